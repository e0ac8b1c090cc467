import multiprocessing
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.ground.rng import Key, Stream, fold_in, isolated

parts = st.one_of(st.integers(), st.text(max_size=5))
paths = st.lists(parts, max_size=4).map(tuple)


def draws(key):
    return torch.rand(4, generator=key.generator())


@given(paths)
def test_one_path_gives_the_same_draws_every_time(path):
    assert torch.equal(draws(Key(path)), draws(Key(path)))


@given(paths, paths)
def test_different_paths_give_different_draws(one, other):
    assert (one == other) == torch.equal(draws(Key(one)), draws(Key(other)))


@pytest.mark.parametrize("other", [(1, 0), ("0", 1), (0,), (0, 1, 0), ("0, 1",)])
def test_order_type_and_length_of_a_path_matter(other):
    assert Key((0, 1)).seed != Key(other).seed


def test_a_run_is_reproducible_across_processes():
    # The first 8 bytes of `printf "(0, 'client', 1, 2, 3)" | b2sum -l 64`, big-endian, less the lowest bit.
    assert fold_in(0, "client", 1, 2, 3).seed == 751259906438950745


@given(paths)
def test_a_seed_fits_63_bits(path):
    assert 0 <= Key(path).seed < 2**63


@given(paths, paths)
def test_folding_appends_to_the_path_and_leaves_the_key(path, more):
    key = Key(path)
    assert key.fold(*more) == Key(path + more)
    assert key.path == path


def test_a_run_starts_its_paths_with_the_seed():
    assert fold_in(7, "cohort", 3) == Key((7, "cohort", 3))


def test_equal_keys_have_equal_seeds():
    class Client(IntEnum):
        THIRD = 3

    assert Key((Client.THIRD,)) == Key((3,))
    assert Key((Client.THIRD,)).seed == Key((3,)).seed


@pytest.mark.parametrize("kind", [np.int64, np.uint8, int])
def test_whole_numbers_of_any_kind_are_one_part(kind):
    assert Key((kind(3),)) == Key((3,))
    assert Key((kind(3),)).seed == Key((3,)).seed


def test_text_of_any_kind_is_one_part():
    class Purpose(str, Enum):  # noqa: UP042 - StrEnum prints as its value, this prints as its name
        COHORT = "cohort"

    assert Key((Purpose.COHORT,)) == Key(("cohort",))


@pytest.mark.parametrize("part", [1.5, None, (1,)])
def test_a_part_is_a_whole_number_or_text(part):
    with pytest.raises(TypeError):
        Key((part,))


def test_order_of_draws_does_not_matter():
    first, second = Key((1, "a")), Key((1, "b"))
    forth = draws(first), draws(second)
    back = draws(second), draws(first)
    assert torch.equal(forth[0], back[1])
    assert torch.equal(forth[1], back[0])


@pytest.mark.usefixtures("global_generator_unchanged")
def test_a_generator_of_its_own_leaves_the_global_one():
    draws(Key((1,)))


@pytest.mark.usefixtures("global_generator_unchanged")
def test_isolated_draws_depend_on_the_key_alone():
    def drawn(key):
        with isolated(key):
            return torch.rand(3)

    assert torch.equal(drawn(Key((1,))), drawn(Key((1,))))
    assert not torch.equal(drawn(Key((1,))), drawn(Key((2,))))


@pytest.mark.usefixtures("global_generator_unchanged")
def test_isolated_puts_the_state_back_after_an_error():
    with pytest.raises(RuntimeError), isolated(Key((1,))):
        torch.rand(3).view(2)


@pytest.mark.usefixtures("global_generator_unchanged")
def test_an_isolated_block_inside_another_does_not_advance_it():
    with isolated(Key((1,))):
        straight = torch.rand(2)
    with isolated(Key((1,))):
        first = torch.rand(1)
        with isolated(Key((2,))):
            torch.rand(9)
        assert torch.equal(torch.cat([first, torch.rand(1)]), straight)


@pytest.mark.usefixtures("global_generator_unchanged")
def test_threads_do_not_draw_from_each_others_blocks():
    def drawn(key, between=lambda: None):
        found = []
        stream = Stream(key)
        for turn in range(6):
            with isolated(key.fold(turn)) if turn % 2 else stream.flowing():
                for _ in range(4):
                    found.append(torch.rand(2))
                    between()
        return torch.cat(found)

    keys = [Key(("thread", number)) for number in range(3)]
    alone = [drawn(key) for key in keys]
    with ThreadPoolExecutor(len(keys)) as threads:
        # Sleeping lets the others run; a barrier inside the blocks would wait for ever, as one is in them at a time.
        together = list(threads.map(lambda key: drawn(key, lambda: time.sleep(0.001)), keys))
    assert all(map(torch.equal, alone, together))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_process_forked_while_a_thread_is_in_a_block_can_enter_one():
    inside, over = threading.Event(), threading.Event()

    def stay():
        with isolated(Key((1,))):
            inside.set()
            over.wait()

    def enter(key):
        with isolated(key):
            pass

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, on forking beside threads
        child = multiprocessing.get_context("fork").Process(target=enter, args=(Key((2,)),))
        child.start()
    child.join(60)
    over.set()
    thread.join()
    stuck = child.is_alive()
    child.kill()
    assert not stuck
    assert child.exitcode == 0
