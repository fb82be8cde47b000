"""What a connection costs: handshakes per CPU second, bytes per handshake, and sealed bytes per CPU second.

    python bench/handshake.py [--quick] [--json]

A handshake is counted whole: the CPU seconds of both sides together, in one process, on one core, with fresh
keys every time and both identity signatures made and checked. Sealing is one direction: a box made, or opened.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

from form import asking, report, versions

from atoll.crypto import noise
from atoll.crypto.identity import Identity
from atoll.crypto.noise import NoiseHandshake
from atoll.crypto.noise_pattern import HYBRID, HandshakeRole
from atoll.crypto.seal import TAG_BYTES, AeadAlgorithm, ReceivingCipher, SendingCipher

REPETITIONS = 5  # the median is reported, so that one noisy neighbour does not decide


def rate_per_cpu_s(work: Callable[[], object], cpu_s: float) -> float:
    """Calls per CPU second, median over REPETITIONS spans of `cpu_s`."""
    work()
    rates: list[float] = []
    for _ in range(REPETITIONS):
        count, begin = 0, time.process_time()
        while (spent_s := time.process_time() - begin) < cpu_s:
            work()
            count += 1
        rates.append(count / spent_s)
    return statistics.median(rates)


def shake(opening: Callable[[HandshakeRole, Identity], NoiseHandshake], one: Identity, other: Identity) -> int:
    """One handshake; the bytes of its three messages."""
    initiator, responder = opening(HandshakeRole.INITIATOR, one), opening(HandshakeRole.RESPONDER, other)
    first = initiator.start()
    second = responder.receive(first)
    assert second is not None
    third = initiator.receive(second)
    assert third is not None
    responder.receive(third)
    assert initiator.result is not None and responder.result is not None
    return len(first) + len(second) + len(third)


def sealing_gb_per_cpu_s(aead: AeadAlgorithm, plain_bytes: int, cpu_s: float) -> tuple[float, float]:
    """(made, opened) in GB per CPU second, in place in one buffer, rekeying included."""
    buffer = memoryview(bytearray(plain_bytes + TAG_BYTES))
    plain, key = buffer[:plain_bytes], bytes(32)
    seal = SendingCipher(key, aead, rekey_bytes=2**30)
    made = rate_per_cpu_s(lambda: seal.seal_into(plain, buffer), cpu_s)
    template = bytes(SendingCipher(key, aead).seal(bytes(plain_bytes)))
    out = memoryview(bytearray(plain_bytes))
    opened = rate_per_cpu_s(lambda: ReceivingCipher(key, aead).open_into(template, out), cpu_s)
    return made * plain_bytes / 1e9, opened * plain_bytes / 1e9


def measure(cpu_s: float) -> dict[str, float]:
    one, other = Identity.generate(), Identity.generate()

    def hybrid(role: HandshakeRole, identity: Identity) -> NoiseHandshake:
        return noise.hybrid(role, identity, network=b"bench")

    figures: dict[str, float] = {
        "per_second_per_core": rate_per_cpu_s(lambda: shake(hybrid, one, other), cpu_s),
        "bytes_total": shake(hybrid, one, other),
        "classical_per_second_per_core": rate_per_cpu_s(lambda: shake(noise.classical, one, other), cpu_s),
        "classical_bytes_total": shake(noise.classical, one, other),
    }
    for aead in AeadAlgorithm:
        for plain_kib in (64, 256, 1024):
            made, opened = sealing_gb_per_cpu_s(aead, plain_kib * 1024, cpu_s / 4)
            name = aead.value.lower().replace("-", "_")
            figures[f"seal_{name}_{plain_kib}k_gb_per_s"] = made
            figures[f"open_{name}_{plain_kib}k_gb_per_s"] = opened
    return {name: round(value, 2) for name, value in figures.items()}


def main() -> None:
    arguments = asking(__doc__, "a tenth of the time, for a first impression").parse_args()
    cpu_s = 0.1 if arguments.quick else 1.0
    settings = {
        "suite": HYBRID.name.decode(),
        "counted": "CPU seconds of both sides together, one process, one core",
        "cpu_s_per_span": cpu_s,
        "spans": REPETITIONS,
    }
    ours = versions("cryptography") | {"machine": platform.machine()}
    figures = measure(cpu_s)
    if arguments.json:
        print(report("handshake", settings, figures, ours))
        return
    for name, value in (settings | ours | figures).items():
        print(f"{name:44} {value}")


if __name__ == "__main__":
    main()
