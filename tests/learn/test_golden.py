import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# What every honest peer must compute, on any processor. A change here is a change of the protocol: it needs a
# new version of the format in specs/codecs.md, since peers of both kinds would disagree for ever.
GOLDEN = {
    "fp32 encode": "88bd205762c214c4",
    "fp32 decode": "88bd205762c214c4",
    "fp32 combine fp32": "f416535f505de7c0",
    "fp32 combine int8": "97a35854536e7354",
    "fp32 combine 2bit": "2dc2494d0bbfba74",
    "int8 encode": "9fbd2af1141e2c12",
    "int8 decode": "d87eb8fba547743e",
    "int8 combine fp32": "b6628c9909f0773e",
    "int8 combine int8": "9133579ec968b5b9",
    "int8 combine 2bit": "a1bcd805d2c8cdbe",
    "2bit encode": "609b88d9146eadc1",
    "2bit decode": "b663893ef344f8a6",
    "2bit combine fp32": "5a4626dc574fd3ff",
    "2bit combine int8": "989d4b6847b6908c",
    "2bit combine 2bit": "2c1acf4a074cf94b",
    "state": "ebd4129198c352ed",
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
