"""The order in which requests are admitted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chatserve.sched.queue import WaitingQueue
from chatserve.sched.request import Phase, Request
from chatserve.types import RequestId, SamplingParams, UserId


def make_request(arrival: int, user: str) -> Request:
    return Request(
        request_id=RequestId(f"{user}{arrival}"),
        user=UserId(user),
        token_ids=[1],
        num_shared_tokens=0,
        num_prompt_tokens=1,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
        context_tokens=100,
        arrival=arrival,
    )


def take_all(queue: WaitingQueue) -> list[str]:
    taken = []
    while queue:
        request = next(queue.in_order())
        queue.take(request)
        queue.check()
        taken.append(str(request.request_id))
    return taken


def test_users_take_turns_and_each_is_served_in_order() -> None:
    queue = WaitingQueue()
    for arrival, user in enumerate("aaaabbc"):
        queue.push(make_request(arrival, user))
    assert [str(request.request_id) for request in queue.in_order()] == ["a0", "b4", "c6", "a1", "b5", "a2", "a3"]
    assert take_all(queue) == ["a0", "b4", "c6", "a1", "b5", "a2", "a3"]


def test_turns_go_on_where_they_were_when_more_arrives() -> None:
    queue = WaitingQueue()
    for arrival, user in enumerate("aab"):
        queue.push(make_request(arrival, user))
    queue.take(next(queue.in_order()))
    queue.push(make_request(3, "a"))
    queue.push(make_request(4, "c"))
    assert take_all(queue) == ["b2", "a1", "c4", "a3"]


def test_preempted_requests_come_first_and_the_oldest_of_them_first() -> None:
    queue = WaitingQueue()
    queue.push(make_request(9, "a"))
    for arrival in (5, 2, 7):
        request = make_request(arrival, "b")
        request.phase = Phase.PREEMPTED
        queue.push_preempted(request)
    assert queue.num_new == 1
    assert take_all(queue) == ["b2", "b5", "b7", "a9"]


def test_leaving_the_queue_costs_nobody_a_turn() -> None:
    queue = WaitingQueue()
    requests = [make_request(arrival, user) for arrival, user in enumerate("abab")]
    for request in requests:
        queue.push(request)
    queue.remove(requests[0])
    assert take_all(queue) == ["a2", "b1", "b3"]


@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_nobody_is_served_twice_while_another_waits(users: list[str]) -> None:
    queue = WaitingQueue()
    for arrival, user in enumerate(users):
        queue.push(make_request(arrival, user))
    order = [request.user for request in queue.in_order()]
    assert len(order) == len(users)
    for index, user in enumerate(order):
        turn = order[:index].count(user)
        assert all(order[:index].count(other) >= min(turn, users.count(other)) for other in "abc")
