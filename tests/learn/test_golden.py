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
    "fp32 compare": "ad4e2e9a3b7a1448",
    "fp16 encode": "6d0a851ab58fa2d2",
    "fp16 decode": "562bb08e50a5b2f6",
    "fp16 combine fp16": "a95873245087a0c8",
    "fp16 combine int8": "9e7f13a80f0dc2a1",
    "bf16 encode": "e04ba65968b07c26",
    "bf16 decode": "8527975007006197",
    "bf16 combine bf16": "133627ac019b6d95",
    "bf16 combine int8": "aa20743bb2be81d4",
    "int8 encode": "9fbd2af1141e2c12",
    "int8 decode": "d87eb8fba547743e",
    "int8 combine fp32": "b6628c9909f0773e",
    "int8 combine int8": "9133579ec968b5b9",
    "int8 combine 2bit": "a1bcd805d2c8cdbe",
    "int8 compare": "1d4b477dca80d6f2",
    "int4 encode": "8218a8f464c60c5b",
    "int4 decode": "4e76f9fe3f996903",
    "int4 combine int4": "0c2f00faed851012",
    "int4 combine int8": "eed1f8cfeee16abe",
    "e3m0 encode": "f3f397f3287e47d0",
    "e3m0 decode": "d43d0f3bbab1341d",
    "e3m0 combine e3m0": "780c2ac374e68c2c",
    "e3m0 combine int8": "60ddc4f2a286b3e1",
    "2bit encode": "609b88d9146eadc1",
    "2bit decode": "b663893ef344f8a6",
    "2bit combine fp32": "5a4626dc574fd3ff",
    "2bit combine int8": "989d4b6847b6908c",
    "2bit combine 2bit": "2c1acf4a074cf94b",
    "2means encode": "223a8fc95f3cb1b4",
    "2means decode": "288e018d3f3e6821",
    "2means combine 2means": "ae2c946ccb324ab9",
    "2means combine int8": "c7601a25b4108031",
    "sign encode": "afb8cd1a3fb6d6a6",
    "sign decode": "b6f063c2ff8ad53f",
    "sign combine sign": "e0dba37290c5eded",
    "sign combine int8": "21aad6092b319cc9",
    "topk:0.1+int8 encode": "323d7d42996513eb",
    "topk:0.1+int8 decode": "de1825c2fc16cd91",
    "topk:0.1+int8 combine topk:0.1+int8": "d9d9a453cc3247c9",
    "topk:0.1+int8 combine int8": "53df06c059e4ccda",
    "topk-rice:0.1+int8 encode": "cb68ea0d14d35e76",
    "topk-rice:0.1+int8 decode": "de1825c2fc16cd91",
    "topk-rice:0.1+int8 combine topk-rice:0.1+int8": "b147d73f4465c343",
    "topk-rice:0.1+int8 combine int8": "53df06c059e4ccda",
    "sparseloco encode": "4d68fd404a87c7b9",
    "sparseloco decode": "00a41e0e9d598092",
    "sparseloco combine sparseloco": "c45838f197cd6be2",
    "sparseloco combine int8": "aaf8b72ffaf7a8a5",
    "randk:0.1+int8 encode": "d131566a8bea2a5d",
    "randk:0.1+int8 decode": "cc4c23252f1f8bde",
    "randk:0.1+int8 combine randk:0.1+int8": "33dcd77c99a444df",
    "randk:0.1+int8 combine int8": "6cb5371256125e9c",
    "sparse+int4 encode": "070289bf9bf1f196",
    "sparse+int4 decode": "738648f94148a3c4",
    "sparse+int4 combine sparse+int4": "8c87bfef32416fd6",
    "sparse+int4 combine int8": "46e68eac6bd0fbf3",
    "dct+int8 encode": "c2a77eac43ffbd12",
    "dct+int8 decode": "decf2ae8a0c4ba7d",
    "dct+int8 combine dct+int8": "8d0df4e38ac51961",
    "dct+int8 combine int8": "1df66d9d729f5a4e",
    "demo encode": "a8a69fddda52017e",
    "demo decode": "e6e29601a78e9e0b",
    "demo combine demo": "bef62c8d619027e8",
    "demo combine int8": "a9674fe064028b85",
    "delta+int8 encode": "18d6567145b243af",
    "delta+int8 decode": "a01335a64da306e4",
    "delta+int8 combine delta+int8": "8b9a8974b134e4cd",
    "delta+int8 combine int8": "df907c80e92e9d17",
    "changed+2bit encode": "b9f2dd747cd23cd5",
    "changed+2bit decode": "b663893ef344f8a6",
    "changed+2bit combine changed+2bit": "081324f8b12c6086",
    "changed+2bit combine int8": "989d4b6847b6908c",
    "2bit+zstd:3 decode": "b663893ef344f8a6",
    "2bit+zstd:3 combine int8": "989d4b6847b6908c",
    "lowrank:4+int8 decode": "37cf4a55dcc5274d",
    "lowrank:4+int8 combine int8": "f13dc2953179f51a",
    "centred_clipping weights": "de40bda53425d3db",
    "geometric_median weights": "4dac3aa4063145c0",
    "krum weights": "6a2992a793203c73",
    "mda weights": "130e635d7db967ed",
    "multi_krum weights": "130e635d7db967ed",
    "robust weights": "917201e524f7aac9",
    "gathered answer": "86f437b463468519",
    "gathered read": "52a1bc3efc534cdb",
    "agreeing step": "ca9a95802371658a",
    "adamw state": "dd8ddb603226accb",
    "state": "ebd4129198c352ed",
}


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_honest_peers_compute_the_same_bits(capability):
    """Codecs, combine and two whole rounds, per instruction set, with one and with two threads."""
    assert computed({"ATEN_CPU_CAPABILITY": capability}) == GOLDEN


@pytest.mark.parametrize("processor", ["generic", None])
def test_compiled_kernels_compute_the_same_bits(processor):
    """For this computer's processor, and for the oldest of its family: no fused operation, no other order."""
    pytest.importorskip("numba", reason="kernels are compiled by numba: pip install atoll[fast]")
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
