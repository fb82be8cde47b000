import pytest

from atoll.base.units import count_text, parse_count, parse_rate_bytes_s
from atoll.policy.pace import pace, simple_exchange_s, steps_for


def test_an_exchange_costs_what_training_cannot_hide():
    """Ten steps of a second, two exchanges of three: five sixteenths more; three steps of overlap hide all."""
    assert pace([3, 3], 10, 1.0).round_s == 16
    assert pace([3, 3], 10, 1.0, overlap=1).round_s == 14
    assert pace([3, 3], 10, 1.0, overlap=3).utilisation == 1


def test_so_many_steps_reach_the_share_and_one_fewer_does_not():
    steps = steps_for(0.9, [7.0, 1.5], 0.4)
    assert pace([7.0, 1.5], steps, 0.4).utilisation >= 0.9 > pace([7.0, 1.5], steps - 1, 0.4).utilisation
    hidden = steps_for(0.9, [7.0, 1.5], 0.4, overlap=4)  # 1.6 s hide all of the second
    assert pace([7.0, 1.5], hidden, 0.4, 4).utilisation >= 0.9 > pace([7.0, 1.5], hidden - 1, 0.4, 4).utilisation


def test_the_slower_direction_decides():
    assert simple_exchange_s(10, 30, 5, 10, hops=2, latency_s=1) == 5
    assert simple_exchange_s(20, 30, 5, 10, hops=1, latency_s=1) == 5


def test_quantities_are_read_as_people_write_them():
    assert (
        parse_rate_bytes_s("20Mbit") == parse_rate_bytes_s("2.5 MB/s") == parse_rate_bytes_s("20 Mbit/s") == 2.5e6
    )
    assert [parse_count(text) for text in ("1B", "350M", "22k", "1.5B", "7")] == [10**9, 350e6, 22e3, 15e8, 7]
    assert count_text(167_936) == "168 k" and count_text(10**9) == "1 B"
    for read, text in ((parse_rate_bytes_s, "20"), (parse_rate_bytes_s, "0Mbit"), (parse_count, "big")):
        with pytest.raises(ValueError, match="write for example"):
            read(text)
