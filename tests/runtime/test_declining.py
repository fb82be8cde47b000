"""What an attached loop is asked for where rounds are passes over its own data, and what its decline does."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from atoll.base.errors import RunFailedError
from atoll.runtime.embed.attached_trainer import AttachedTrainer
from atoll.runtime.embed.loop_log import LOOP_KILLED
from atoll.runtime.embed.messages import DeclineRounds, LoopDetachNotice, ToUser
from atoll.runtime.embed.peer_process import farewell_of
from atoll.runtime.trainer.protocol import LENGTH, StepsTrained, TrainSteps
from atoll.training.recipe.recipes import custom_loop_recipe


class Pipe:
    """What the peer's side writes to the loop."""

    def __init__(self) -> None:
        self.said: list[ToUser] = []

    def write(self, data: bytes) -> None:
        self.said.append(msgspec.msgpack.decode(data[LENGTH.size :], type=ToUser))


def frame(word: object) -> bytes:
    body = msgspec.msgpack.encode(word)
    return LENGTH.pack(len(body)) + body


def asked(pass_steps: int, *answers: object, epochs: int = 0) -> tuple[TrainSteps, object, list[int]]:
    """A round of at most 20 steps is asked for, and these are the loop's words: (what it is asked, what comes of
    it, how many rounds were declined each time)."""

    async def told() -> tuple[TrainSteps, object, list[int]]:
        reader, pipe, declined = asyncio.StreamReader(), Pipe(), list[int]()
        trainer = AttachedTrainer(reader, pipe, None)  # pyright: ignore[reportArgumentType]
        trainer.recipe = custom_loop_recipe(rounds=3, inner_steps=20, epochs=epochs)
        trainer.pass_steps, trainer.on_decline = pass_steps, declined.append
        hearing = asyncio.create_task(trainer.read_messages())
        training = asyncio.create_task(trainer.train(20, cursor=0, shard=0, shards=1, global_step=0))
        while not pipe.said:
            await asyncio.sleep(0)
        for answer in answers:
            reader.feed_data(frame(answer))
        try:
            came: object = await asyncio.wait_for(training, 60)
        except RunFailedError as why:
            came = why
        reader.feed_eof()
        await hearing
        word = pipe.said[0]
        assert isinstance(word, TrainSteps)
        return word, came, declined

    return asyncio.run(told())


@pytest.mark.parametrize(("says", "why"), [([LoopDetachNotice()], "its training loop ended"), ([], LOOP_KILLED)])
def test_a_loop_that_was_killed_takes_leave_in_other_words(says: list[object], why: str):
    """Its peer process outlives it, and tells the others why it leaves."""

    async def farewell() -> str:
        reader = asyncio.StreamReader()
        trainer = AttachedTrainer(reader, Pipe(), None)  # pyright: ignore[reportArgumentType]
        for message in says:
            reader.feed_data(frame(message))
        reader.feed_eof()
        await trainer.read_messages()
        return farewell_of(trainer, [])

    assert asyncio.run(farewell()) == why


TRAINED = StepsTrained(7, 112, 112, 1.0, 0.1, 0, ())


@pytest.mark.parametrize(("pass_steps", "epochs", "steps"), [(7, 1, 7), (7, 2, 14), (29, 1, 20), (7, 0, 20)])
def test_a_round_is_so_many_passes_over_the_loops_own_data_within_its_bound(pass_steps, epochs, steps):
    word, came, _ = asked(pass_steps, TRAINED, epochs=epochs)
    assert word.steps == steps and came == TRAINED


def test_a_loop_that_declines_gives_nothing_and_its_trainer_has_not_failed():
    """TrainerCommandError would have it waited for longer and longer, and given up in the end."""
    _, came, declined = asked(7, DeclineRounds(1, 3))
    assert isinstance(came, RunFailedError) and "declined" in came.what and declined == [3]


def test_a_decline_of_another_round_ends_no_training():
    """The loop had gone ahead when it declined: the round that it is asked for by now goes on."""
    _, came, declined = asked(7, DeclineRounds(0, 2), TRAINED)
    assert came == TRAINED and declined == [2]
