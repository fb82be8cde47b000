"""Lets the tests here import `libp2p_pair` and `driver`: pytest's importlib mode leaves sys.path alone."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "interop")]
