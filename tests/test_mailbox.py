"""The mailbox: all processes that hold a box see what one of them posts, however they were started, and once each."""

# Without torch, which each spawned process would import anew.
from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import time
from collections.abc import Callable
from itertools import product
from multiprocessing import forkserver
from multiprocessing.heap import BufferWrapper, Heap
from typing import Any

import pytest

from lightning_amp_plus.trainer.mailbox import Mailbox

# What Python 3.12 says about any fork of a process that has started a thread.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

METHODS = ("spawn", "fork", "forkserver")
ROOM = 2**16 - 8
methods = pytest.mark.parametrize("method", METHODS)
fresh_methods = pytest.mark.parametrize("method", ["spawn", "forkserver"])


def through_pickle(box: Mailbox) -> Mailbox:
    copied: Mailbox = pickle.loads(pickle.dumps(box))  # noqa: S301
    return copied


def body_of(size: int) -> bytes:
    """Return what ``pickle`` makes ``size`` bytes of."""
    body = b"x" * (2 * size - len(pickle.dumps(b"x" * size)))
    assert len(pickle.dumps(body)) == size
    return body


def start(method: str, target: Callable[..., object], *arguments: Any) -> Any:
    """Call ``target`` in a new process."""
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def end(process: Any) -> None:
    process.join(60)
    assert process.exitcode == 0


def run(method: str, target: Callable[..., object], *arguments: Any) -> None:
    """Call ``target`` in a new process and wait for its end."""
    end(start(method, target, *arguments))


# In the workers -------------------------------------------------------------------------------------------------------


def post(box: Mailbox, *messages: object) -> None:
    for message in messages:
        box.post(message)


def answer_the_news(box: Mailbox, answer: Mailbox) -> None:
    answer.post((box.news(), box.news()))


def reply_to_the_next(box: Mailbox) -> None:
    give_up = time.monotonic() + 30
    while (message := box.news()) is None:
        assert time.monotonic() < give_up
        time.sleep(0.001)
    box.post(("reply to", message))


def let_another_post(box: Mailbox, answer: Mailbox, method: str) -> None:
    vars(forkserver)["_forkserver"]._forkserver_pid = None  # a fork cannot use the server of its parent
    run(method, post, box, "from below")
    answer_the_news(box, answer)


def use_copies(box: Mailbox, answer: Mailbox) -> None:
    copies = copy.copy(box), copy.deepcopy(box), through_pickle(box)
    found = [copied.news() for copied in copies]
    for copied in copies:
        copied.post("in a copy")
    answer.post((found, box.news()))


def turn_to_a_box_of_its_own(boxes: list[Mailbox], answer: Mailbox) -> None:
    boxes.clear()
    gc.collect()
    own = Mailbox()
    run("fork", post, own, "in the worker's own")
    answer_the_news(own, answer)


# News -----------------------------------------------------------------------------------------------------------------


def test_a_new_box_is_empty() -> None:
    assert Mailbox().news() is None


def test_ones_own_post_is_no_news() -> None:
    box = Mailbox()
    box.post("for others")
    assert box.news() is None
    run("fork", post, box, "from another")
    assert box.news() == "from another"


@methods
def test_the_last_message_arrives_once(method: str) -> None:
    box = Mailbox()
    run(method, post, box, "first, and longer", {"scale": 2.0**16, "steps": (1, None, 2**100)})
    assert box.news() == {"scale": 2.0**16, "steps": (1, None, 2**100)}
    assert box.news() is None


def test_the_last_worker_wins() -> None:
    box = Mailbox()
    run("spawn", post, box, "of the first, and longer")
    run("fork", post, box, "of the last")
    assert box.news() == "of the last"
    assert box.news() is None


def test_ones_own_post_replaces_what_one_has_not_read() -> None:
    box = Mailbox()
    run("fork", post, box, "too late")
    box.post("of the parent")
    assert box.news() is None


def test_the_same_message_again_is_news() -> None:
    box = Mailbox()
    for _ in range(300):  # the number of the message takes more than a byte
        box.post("again")
    assert box.news() is None
    for _ in range(2):
        run("fork", post, box, "again")
        assert box.news() == "again"
        assert box.news() is None


@methods
def test_two_boxes_do_not_see_each_other(method: str) -> None:
    one, other = Mailbox(), Mailbox()
    run(method, post, one, "one")
    assert other.news() is None
    run("fork", post, other, "other")
    assert (one.news(), other.news()) == ("one", "other")


def test_a_box_serves_one_start_after_another() -> None:
    box = Mailbox()
    for number, method in enumerate(("fork", "spawn", "fork", "forkserver", "fork")):
        run(method, post, box, (method, number))
        assert box.news() == (method, number)
        assert box.news() is None


# All holders ----------------------------------------------------------------------------------------------------------


@methods
def test_a_worker_and_its_parent_see_the_same_message(method: str) -> None:
    box, answer = Mailbox(), Mailbox()
    run("fork", post, box, "for all")
    run(method, answer_the_news, box, answer)
    assert answer.news() == ("for all", None)
    assert box.news() == "for all"
    assert box.news() is None


@methods
def test_what_the_parent_has_seen_is_no_news_to_its_worker(method: str) -> None:
    box, answer = Mailbox(), Mailbox()
    run("fork", post, box, "seen")
    assert box.news() == "seen"
    run(method, answer_the_news, box, answer)
    assert answer.news() == (None, None)


@methods
def test_what_the_parent_has_posted_is_no_news_to_its_worker(method: str) -> None:
    box, answer = Mailbox(), Mailbox()
    box.post("of the parent")
    run(method, answer_the_news, box, answer)
    assert answer.news() == (None, None)


@methods
def test_parent_and_worker_write_to_each_other(method: str) -> None:
    box = Mailbox()
    worker = start(method, reply_to_the_next, box)
    box.post("of the parent")
    end(worker)
    assert box.news() == ("reply to", "of the parent")


@fresh_methods
def test_a_worker_hears_from_one_that_is_started_after_it(method: str) -> None:
    box = Mailbox()
    worker = start("fork", reply_to_the_next, box)
    run(method, post, box, "of the second")
    end(worker)
    assert box.news() == ("reply to", "of the second")


@fresh_methods
def test_a_message_between_two_starts_stays(method: str) -> None:
    box, answer = Mailbox(), Mailbox()
    run(method, post, box, "before")
    run("fork", post, box, "between")
    run(method, answer_the_news, box, answer)
    assert answer.news() == ("between", None)
    assert box.news() == "between"


# Copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copier",
    [copy.copy, copy.deepcopy, through_pickle],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_is_an_empty_box_of_its_own(copier: Callable[[Mailbox], Mailbox]) -> None:
    box = Mailbox()
    run("fork", post, box, "for the box")
    other = copier(box)
    assert other.news() is None
    run("fork", post, other, "for the copy")
    assert box.news() == "for the box"
    assert other.news() == "for the copy"


@methods
def test_a_copy_that_a_worker_makes_is_a_box_of_its_own(method: str) -> None:
    box, answer = Mailbox(), Mailbox()
    run("fork", post, box, "for the box")
    run(method, use_copies, box, answer)
    assert answer.news() == ([None, None, None], "for the box")
    assert box.news() == "for the box"


# Nested ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outer", "inner"), [*product(METHODS, METHODS)])
def test_a_worker_of_a_worker_reaches_both(outer: str, inner: str) -> None:
    box, answer = Mailbox(), Mailbox()
    run(outer, let_another_post, box, answer, inner)
    assert answer.news() == ("from below", None)  # which the worker posts after it has had a worker
    assert box.news() == "from below"


# Messages that do not fit ---------------------------------------------------------------------------------------------


def test_a_message_that_just_fits_arrives_whole() -> None:
    box = Mailbox()
    body = body_of(ROOM)
    run("fork", post, box, body)
    assert box.news() == body


@pytest.mark.parametrize("size", [ROOM + 1, 2 * ROOM])
def test_a_message_that_does_not_fit_leaves_the_one_before(size: int) -> None:
    box = Mailbox()
    run("fork", post, box, "it fits")
    with pytest.raises(ValueError, match=f"A message of {size} bytes does not fit into the {ROOM} bytes of a Mailbox"):
        box.post(body_of(size))
    assert box.news() == "it fits"
    assert box.news() is None


def test_a_message_that_cannot_be_pickled_leaves_the_one_before() -> None:
    box = Mailbox()
    run("fork", post, box, "it can")
    with pytest.raises((AttributeError, pickle.PicklingError)):
        box.post(lambda: None)
    assert box.news() == "it can"
    assert box.news() is None


# Memory ---------------------------------------------------------------------------------------------------------------


def test_a_box_does_not_find_what_an_earlier_one_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that is gone had a message that nobody read; the next plugin must not take it for its own."""
    monkeypatch.setattr(BufferWrapper, "_heap", Heap())  # without blocks that other tests have left
    earlier = Mailbox()
    run("fork", post, earlier, "for the earlier one")
    del earlier
    gc.collect()
    box, answer = Mailbox(), Mailbox()
    assert b"for the earlier one" in bytes(box._memory)  # it is the same block
    assert box.news() is None
    run("fork", answer_the_news, box, answer)
    assert answer.news() == (None, None)


def test_boxes_that_are_gone_leave_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap()
    monkeypatch.setattr(BufferWrapper, "_heap", heap)
    for _ in range(200):
        Mailbox().post("gone")
    gc.collect()
    assert len(vars(heap)["_arenas"]) < 5


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_worker_that_drops_its_box_leaves_it_to_the_parent(method: str) -> None:
    boxes, answer = [Mailbox()], Mailbox()
    run("fork", post, boxes[0], "for the parent")
    run(method, turn_to_a_box_of_its_own, boxes, answer)
    assert answer.news() == ("in the worker's own", None)
    assert boxes[0].news() == "for the parent"
    run("fork", post, boxes[0], "and more")
    assert boxes[0].news() == "and more"
