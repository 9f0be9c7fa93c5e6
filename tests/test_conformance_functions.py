"""The kits for bridges, expand functions and balancers find every planted bug by the number of its rule."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from omni_trio.bridges import Companion, ExpandContext, bridge
from omni_trio.errors import InvalidRequest, StageFailed
from omni_trio.messages import StageInput
from omni_trio.pipeline import Pipeline
from omni_trio.stages import LeastLoaded, RandomReplica, ReplicaLoad, ReplicaState, RoundRobin, StagePool
from omni_trio.testing import SimStage
from omni_trio.testing.conformance import (
    BALANCER_RULES,
    BRIDGE_RULES,
    ConformanceError,
    SlowBridgeWarning,
    bridge_context,
    check_balancer,
    check_bridge,
    check_expand,
)
from support import run, simulated, stage

# ---- bridges

CONTEXTS = [
    bridge_context(token_ids=(1, 2), text="a ", data={"rows": np.ones((2, 2)), "list": [1]}, finished=False),
    bridge_context(token_ids=(1, 2, 3), text="a b ", data={"rows": np.ones((3, 2)), "list": [1, 2]}),
]


def good(context):
    tokens, _ = context.new()
    return StageInput(token_ids=tokens, data={"rows": context.data["rows"].copy()}) if tokens else None


def raises(context):
    return StageInput(token_ids=(context.token_ids[2],))


def returns_a_tuple(context):
    return tuple(context.token_ids)


def changes_the_data(context):
    context.data["list"].append(0)


def hands_on_the_list(context):
    return StageInput(data={"list": context.data["list"]})


def hands_on_a_view(context):
    return StageInput(data={"rows": context.data["rows"][:1]})


def hands_on_its_own_twice(context):
    mine = context.state.setdefault("mine", [])
    return StageInput(data={"mine": mine})


NUMBERS = iter(range(1000))


def differs(context):
    return StageInput(token_ids=(next(NUMBERS),))


@bridge(reads=["tokens"])
def reads_more_than_it_says(context):
    return StageInput(text=context.text or "nothing")


@bridge(reads=["tokens"])
def needs_more_than_it_says(context):
    return StageInput(data={"rows": context.data["rows"].copy()})


def repeats_itself(context):
    return StageInput(text=context.text)


def numpy_tokens(context):
    return StageInput(token_ids=tuple(np.array(context.token_ids)))


PLANTED = {
    raises: 1,
    returns_a_tuple: 2,
    changes_the_data: 3,
    hands_on_the_list: 4,
    hands_on_a_view: 4,
    hands_on_its_own_twice: 4,
    differs: 5,
    reads_more_than_it_says: 6,
    needs_more_than_it_says: 6,
    repeats_itself: 8,
    numpy_tokens: 9,
}


def test_a_bridge_that_keeps_its_promises_passes_and_what_it_made_comes_back():
    first, second = check_bridge(good, CONTEXTS, streams=False)
    assert (first.token_ids, second.token_ids) == ((1, 2), (3,))


def fresh():
    return [
        bridge_context(token_ids=one.token_ids, text=one.text, finished=one.finished, data={
            "rows": one.data["rows"].copy(), "list": list(one.data["list"])
        })
        for one in CONTEXTS
    ]  # fmt: skip


@pytest.mark.parametrize(("function", "number"), PLANTED.items(), ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_bug_in_a_bridge_is_found(function, number):
    with pytest.raises(ConformanceError) as caught:
        check_bridge(function, fresh(), streams=number == 8)
    assert caught.value.rule is BRIDGE_RULES[number]
    assert f"check_bridge({function.__qualname__}, [" in caught.value.example


def test_the_example_of_a_bridge_is_code_that_fails_again():
    with pytest.raises(ConformanceError) as caught:
        check_bridge(raises, fresh())
    scope = {"np": np, "check_bridge": check_bridge, "bridge_context": bridge_context, "raises": raises}
    with pytest.raises(ConformanceError) as again:
        exec(caught.value.example, scope)
    assert again.value.rule is caught.value.rule
    assert again.value.example == caught.value.example


def test_pieces_are_cut_from_a_whole():
    whole = bridge_context(token_ids=tuple(range(20)), text="one two three four")

    def drops_what_is_short(context):
        tokens, text = context.new()
        return StageInput(token_ids=tokens, text=text) if len(tokens) > 3 else None

    def passes_on(context):
        tokens, text = context.new()
        return StageInput(token_ids=tokens, text=text) if tokens else None

    check_bridge(passes_on, [whole], streams=True)
    with pytest.raises(ConformanceError, match="rule 8"):
        check_bridge(drops_what_is_short, [whole], streams=True)


def test_what_can_not_be_sent_is_found():
    def no_text(made):
        if made.text is not None:
            raise TypeError("no text here")

    with pytest.raises(ConformanceError, match=r"rule 11.*\n.*TypeError: no text here"):
        check_bridge(repeats_itself, fresh(), sends=no_text)


def test_a_slow_bridge_is_warned_of_with_the_number_unless_it_has_a_thread():
    def slow(context):
        time.sleep(0.005)

    with pytest.warns(SlowBridgeWarning, match=r"rule 7.*\n.*each call takes \d+\.?\d* ms or more"):
        check_bridge(slow, fresh(), slow=0.002)
    check_bridge(bridge(run_in="thread")(slow), fresh(), slow=0.002)


def test_a_refusal_comes_out_and_is_no_broken_rule():
    def refuses(context):
        raise InvalidRequest("not this one")

    with pytest.raises(InvalidRequest, match="not this one"):
        check_bridge(refuses, fresh())


def test_expand_functions():
    given = ExpandContext(request_id="r", prompt=StageInput(text="a", data={"list": [1]}), params=None)

    def guided(context):
        return [Companion(role="cfg", input=StageInput(text=""))]

    def two_of_a_role(context):
        return guided(context) * 2

    def hands_on(context):
        return [Companion(role="cfg", input=context.prompt)]

    assert [one.role for one in check_expand(guided, given)] == ["cfg"]
    for function, number in ((two_of_a_role, 10), (hands_on, 4)):
        with pytest.raises(ConformanceError) as caught:
            check_expand(function, given)
        assert caught.value.rule is BRIDGE_RULES[number]


# ---- balancers


class Pick:
    def __init__(self, function):
        self.pick = function


def random_ones(replicas, request):
    return random.SystemRandom().randrange(len(replicas))


def slow_ones(replicas, request):
    time.sleep(0.003)
    return min(range(len(replicas)), key=lambda index: replicas[index].load)


async def later(replicas, request):
    return 0


BALANCERS = {
    (lambda replicas, request: replicas[-1].replica_id): 1,
    (lambda replicas, request: replicas[0]): 1,
    later: 2,
    (lambda replicas, request: replicas[3].replica_id): 2,
    random_ones: 3,
    (lambda replicas, request: replicas.sort(key=lambda one: one.load) or 0): 4,
    (lambda replicas, request: 0): 5,
    slow_ones: 6,
}


@pytest.mark.parametrize("kind", [LeastLoaded, RoundRobin, RandomReplica, lambda: RandomReplica(seed=7)])
def test_the_balancers_that_there_are_pass(kind):
    assert check_balancer(kind).kept == tuple(BALANCER_RULES.values())


@pytest.mark.parametrize(("function", "number"), BALANCERS.items(), ids=lambda value: str(value)[:20])
def test_a_planted_bug_in_a_balancer_is_found(function, number):
    with pytest.raises(ConformanceError) as caught:
        check_balancer(lambda: Pick(function), picks=100)
    assert caught.value.rule is BALANCER_RULES[number]
    assert "balancer.pick([ReplicaLoad(replica_id=" in caught.value.example


def test_a_rule_of_balancers_can_be_left_out():
    summary = check_balancer(lambda: Pick(slow_ones), picks=5, skip={6: "the other one is slower"})
    assert [rule.number for rule in summary.not_checked] == [6]


@pytest.mark.parametrize("seed", range(20))
def test_least_loaded_is_what_a_pool_does_by_itself(seed):
    rng = random.Random(seed)
    spec = stage("only", replicas=rng.randint(1, 6))
    pool, balanced = StagePool(spec, 0), StagePool(spec, 0, LeastLoaded())

    async def main():
        for replica in (*pool.replicas, *balanced.replicas):
            replica.state = ReplicaState.READY
        for _ in range(200):
            index = rng.randrange(spec.replicas)
            change, state = rng.choice((-1, 0, 1, 1)), rng.choice((ReplicaState.READY, ReplicaState.DEAD))
            for one in (pool, balanced):
                replica = one.replicas[index]
                replica.load = max(0, replica.load + change)
                replica.state = state if index else ReplicaState.READY
            first = await pool.acquire("r", StageInput())
            assert first.replica_id == (await balanced.acquire("r", StageInput())).replica_id
            for one in (pool, balanced):
                one.replicas[first.replica_id].load += 1

    run(main)


TWO = Pipeline([stage("only", replicas=2)])


def test_a_runtime_asks_the_balancer_of_each_stage():
    asked = []

    def last(replicas, request):
        asked.append((list(replicas), request))
        return len(replicas) - 1

    async def main():
        sim = SimStage()
        async with simulated(TWO, sim, balancers={"only": lambda: Pick(last)}) as runtime:
            await runtime.generate("a b", request_id="mine")
            await runtime.generate("c")
        assert [replica for what, _, replica, *_ in sim.log if what == "submit"] == [1, 1]

    run(main)
    loads, request = asked[0]
    assert loads == [ReplicaLoad(0, 0), ReplicaLoad(1, 0)]
    assert (request.request_id, request.prompt.text) == ("mine", "a b")


@pytest.mark.parametrize("answer", [2, -1, "x", None])
def test_a_balancer_that_is_wrong_fails_the_request_alone(answer):
    async def main():
        answers = iter((answer, 0))
        async with simulated(TWO, balancers={"only": lambda: Pick(lambda *_: next(answers))}) as runtime:
            with pytest.raises(StageFailed, match="its balancer chose"):
                await runtime.generate("a")
            await runtime.generate("b")
            with pytest.raises(StageFailed, match="its balancer raised StopIteration"):
                await runtime.generate("c")

    run(main)


def test_a_balancer_for_no_stage_is_refused():
    async def main():
        async with simulated(TWO, balancers={"olny": RoundRobin}):
            pass

    with pytest.raises(ValueError, match="balancers: no stage is called 'olny'; did you mean 'only'"):
        run(main)
