"""Who answers for a policy worker that has no life left."""

from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Free, PolicyWorkers, Trainer
from tidemill.api.control_messages import AnsweredBy
from tidemill.run.waiting import ANSWERS, REQUESTS, whom_each_awaits
from tidemill.run.who_answers import WhoAnswers


def made(servers: int, exact: bool = False) -> Experiment:
    return Experiment(
        name="x",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(environment=Free(), count=6, agents=(AgentSpec(inference="ask"),)),
            "server": PolicyWorkers(stream="ask", count=servers),
            "trainer": Trainer(algorithm=PPO(), max_policy_lag=0),
        },
        exact_resume=exact,
    )


def moves(found: list[AnsweredBy]) -> dict[str, str]:
    """Return who is to answer each asker."""
    assert {(order.stream, order.policy) for order in found} <= {("ask", "policy")}
    return {order.asker: order.server for order in found}


def test_those_who_live_share_what_the_dead_was_asked_until_nobody_is_left() -> None:
    answering = WhoAnswers(made(3))
    assert answering.answers("server-0") and not answering.answers("actor-0")
    assert answering.heirs(["actor-0"], []) == []
    first = answering.heirs(["server-0"], ["server-0"])
    assert moves(first) == {"actor-0": "server-1", "actor-3": "server-2"}
    answering.move(first)
    assert not answering.answers("server-0")
    assert answering.orders("actor-0") == answering.orders("server-1") == first[:1]
    assert answering.orders("actor-1") == answering.orders("server-0") == []
    second = answering.heirs(["server-1"], ["server-0"])
    assert moves(second) == dict.fromkeys(("actor-0", "actor-1", "actor-4"), "server-2")
    answering.move(second)
    assert answering.orders("actor-0") == [AnsweredBy("ask", "actor-0", "policy", "server-2")]
    assert answering.orders("server-1") == []
    assert len(answering.orders("server-2")) == 4
    assert answering.heirs(["server-2"], ["server-0", "server-1"]) == []


def test_those_who_are_dead_at_once_answer_for_none_of_them() -> None:
    answering = WhoAnswers(made(3))
    assert set(moves(answering.heirs(["server-0", "server-1"], [])).values()) == {"server-2"}
    assert answering.heirs(["server-0", "server-1", "server-2"], []) == []


def test_nobody_answers_for_the_only_one_or_in_a_run_that_resumes_exactly() -> None:
    assert WhoAnswers(made(1)).heirs(["server-0"], []) == []
    assert WhoAnswers(made(2, exact=True)).heirs(["server-0"], []) == []


def test_who_waits_for_answers_waits_for_who_gives_them_now() -> None:
    experiment = made(2)
    answering = WhoAnswers(experiment)
    before = answering.edges
    answering.move(answering.heirs(["server-0"], ["server-0"]))
    assert before == experiment.edges() and answering.edges is not before
    awaited = whom_each_awaits(experiment, answering.edges)
    assert {name: awaited[f"actor-{name}"].get("server-1") for name in range(6)} == dict.fromkeys(
        range(6), ANSWERS
    )
    assert "server-0" not in awaited["actor-0"]
    assert [what for what in awaited["server-1"].values() if what == REQUESTS] == [REQUESTS] * 6
    assert REQUESTS not in awaited["server-0"].values()
