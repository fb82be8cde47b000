import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# What every honest peer must compute, on any processor. A change here is a change of the protocol: it needs a
# new version of the format in specs/codecs.md, since peers of both kinds would disagree for ever.
GOLDEN = {
    "fp32 encode": "96fbb9d4f07197e1",
    "fp32 decode": "96fbb9d4f07197e1",
    "fp32 combine fp32": "5563c071fc7c0ed3",
    "fp32 combine int8": "50fbfb185e5a4af5",
    "fp32 combine 2bit": "e9582178c7a99151",
    "int8 encode": "5b162db7d31b0880",
    "int8 decode": "e3df71b99842b78e",
    "int8 combine fp32": "0f6e05e9e6438128",
    "int8 combine int8": "074df7cec729c38d",
    "int8 combine 2bit": "e0d5b7e81d88bd3b",
    "2bit encode": "3a0262775730a328",
    "2bit decode": "4ccb9f2ed3e93304",
    "2bit combine fp32": "0984c46afda4898a",
    "2bit combine int8": "be8ff67d1f869923",
    "2bit combine 2bit": "dc34e4544ed9f3a7",
    "state": "de29dd25c2680598",
}


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_honest_peers_compute_the_same_bits(capability):
    """Codecs, combine and two whole rounds, per instruction set, with one and with two threads."""
    answer = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("golden.py"))],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    found = json.loads(answer.stdout)
    found.pop("capability")  # what it ran with: a processor may have less than was asked for
    assert found == GOLDEN
