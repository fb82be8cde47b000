import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# What every honest peer must compute, on any processor; `golden.py` prints it for a new codec. To change a line is
# to change the protocol: it needs a new version of the format in specs/codecs.md, since peers of both kinds would
# disagree for ever.
GOLDEN = {
    "fp32 encode": "4886377d6bcb9b7e",
    "fp32 decode": "4886377d6bcb9b7e",
    "fp32 combine fp32": "d33e79f39f252c83",
    "fp32 combine int8": "69497d9f8ba4c76a",
    "fp32 combine 2bit": "85babcb989c2876f",
    "fp32 compare": "8e3116e4402c33ee",
    "fp16 encode": "db74d3107983df1e",
    "fp16 decode": "282b524fa4db2802",
    "fp16 combine fp16": "4a31d9ba5d47c5d4",
    "fp16 combine int8": "fde04f730f8a9512",
    "bf16 encode": "e451eb338fd3599f",
    "bf16 decode": "0c2b1189c1238bdf",
    "bf16 combine bf16": "27fce25b99593253",
    "bf16 combine int8": "bb1c5ad722104f53",
    "int8 encode": "8915f48d7353287c",
    "int8 decode": "3d9e9e553cd4978c",
    "int8 combine fp32": "8d2cbfe89a12224e",
    "int8 combine int8": "dbbffc9857bfe7e9",
    "int8 combine 2bit": "1070ad31855ff6d3",
    "int8 compare": "fff37f155305d32a",
    "int4 encode": "d70d44f57b41ec22",
    "int4 decode": "5974e24b927b16e3",
    "int4 combine int4": "a89764931ffaca0e",
    "int4 combine int8": "05a6754a5d0f2dff",
    "e3m0 encode": "7b793fd1073f90c6",
    "e3m0 decode": "5ef19cf1f3ca8a2b",
    "e3m0 combine e3m0": "26ba86fd6a92eae8",
    "e3m0 combine int8": "3acd26b9df30d788",
    "2bit encode": "57ee8435ed086484",
    "2bit decode": "d454bf15341ffd0e",
    "2bit combine fp32": "4a04bf356b7f09e1",
    "2bit combine int8": "02e961156facd0ed",
    "2bit combine 2bit": "69556b4a6f287573",
    "2means encode": "51c059d5306aebaf",
    "2means decode": "325666e7e2a855ba",
    "2means combine 2means": "3c4432de30327129",
    "2means combine int8": "63b19082d63996e3",
    "sign encode": "945e1056b12c1c49",
    "sign decode": "f4d2f1643d8c3faa",
    "sign combine sign": "0b9f035a735daf2b",
    "sign combine int8": "97d2f493aeb2002e",
    "topk:0.1+int8 encode": "389c9f9e054cd86b",
    "topk:0.1+int8 decode": "04c3573e730fb8ac",
    "topk:0.1+int8 combine topk:0.1+int8": "5280717119a0e643",
    "topk:0.1+int8 combine int8": "f6b513180a158045",
    "topk-rice:0.1+int8 encode": "e991d631013fb8e4",
    "topk-rice:0.1+int8 decode": "04c3573e730fb8ac",
    "topk-rice:0.1+int8 combine topk-rice:0.1+int8": "908d0baeabf623a0",
    "topk-rice:0.1+int8 combine int8": "f6b513180a158045",
    "sparseloco encode": "1344076383d4a099",
    "sparseloco decode": "12d3f49a0fa5d862",
    "sparseloco combine sparseloco": "454ba91e6f3b1f7d",
    "sparseloco combine int8": "adb15d4b02ad88e3",
    "randk:0.1+int8 encode": "11a95011cd2860ae",
    "randk:0.1+int8 decode": "0585a20ee0554a72",
    "randk:0.1+int8 combine randk:0.1+int8": "f801cf39615f0733",
    "randk:0.1+int8 combine int8": "a3b7d01ce1eaef30",
    "sparse+int4 encode": "5fb3c438c165a7d8",
    "sparse+int4 decode": "ec9e98f31a971129",
    "sparse+int4 combine sparse+int4": "e9e7d9df1ea04cef",
    "sparse+int4 combine int8": "4ec3ca36cea68980",
    "dct+int8 encode": "548dc483528d629b",
    "dct+int8 decode": "d666c20816fe32d9",
    "dct+int8 combine dct+int8": "d9771a29f03caedc",
    "dct+int8 combine int8": "acf0a20fa7df9b1c",
    "demo encode": "b11102dd4e751dc7",
    "demo decode": "89fa9a4ea6f23003",
    "demo combine demo": "1ed4b34cf40ab671",
    "demo combine int8": "27a2fef984fd43b9",
    "delta+int8 encode": "076ee676f0d5e1b1",
    "delta+int8 decode": "74a91eebd0421d8f",
    "delta+int8 combine delta+int8": "4264f287e2367bc7",
    "delta+int8 combine int8": "0835ed1bb545cd56",
    "changed+2bit encode": "f9e74be877dd8db2",
    "changed+2bit decode": "d454bf15341ffd0e",
    "changed+2bit combine changed+2bit": "5082638f15878202",
    "changed+2bit combine int8": "02e961156facd0ed",
    "2bit+zstd:3 decode": "d454bf15341ffd0e",
    "2bit+zstd:3 combine int8": "02e961156facd0ed",
    "lowrank:4+int8 decode": "fcddb1a201e356d7",
    "lowrank:4+int8 combine int8": "5c36717c78abe5ce",
    "centered_clipping weights": "de40bda53425d3db",
    "clipped_caf weights": "fccc207ffbe59c1b",
    "geometric_median weights": "4dac3aa4063145c0",
    "krum weights": "6a2992a793203c73",
    "mda weights": "130e635d7db967ed",
    "multi_krum weights": "130e635d7db967ed",
    "robust weights": "917201e524f7aac9",
    "gathered answer": "757ba2ffb461fcb5",
    "gathered read": "8ec8ed2eecfc0d3d",
    "agreeing step": "898087723bec07d0",
    "adamw state": "0926936c4fe5d48b",
    "state": "c9e463890c6d3cfc",
    "nnm + krum weights": "130e635d7db967ed",
    "nnm + multi_krum weights": "50f4fe4e5557846b",
    "nnm + geometric_median weights": "50f4fe4e5557846b",
    "nnm + centered_clipping weights": "6337ac495d27ecd0",
}


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_honest_peers_compute_the_same_bits(capability):
    """Codecs, combine and two whole rounds, per instruction set, with one and with two threads."""
    assert computed({"ATEN_CPU_CAPABILITY": capability}) == GOLDEN


@pytest.mark.parametrize("processor", [None, pytest.param("generic", marks=pytest.mark.long)])
def test_compiled_kernels_compute_the_same_bits(processor):
    """For this computer's processor, and for the oldest of its family: no fused operation, no other order."""
    pytest.importorskip("numba", reason="kernels are compiled by numba: pip install numba")
    found = computed({"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ""} if processor else {}, "native")
    assert len(found) > 20 and found.items() <= GOLDEN.items()


def computed(environment: dict[str, str], *arguments: str) -> dict[str, str]:
    answer = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("golden.py")), *arguments],
        env=os.environ | {"OMP_WAIT_POLICY": "passive"} | environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    found = json.loads(answer.stdout)
    found.pop("capability")  # what it ran with: a processor may have less than was asked for
    return found
