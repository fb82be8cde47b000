"""One thread, and `toy` can be imported: pytest's importlib mode leaves sys.path alone."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # small tensors: a second thread costs more than it brings
