"""The inline inference stream: the policy runs in the actor, at `flush`, batched over
everything that was posted."""

from collections.abc import Mapping

import numpy as np

from tidemill.api.policy import Policy, check_next_state, misfit
from tidemill.api.stream import Answer, InferenceClient
from tidemill.core.clock import Clock
from tidemill.core.cut import Part
from tidemill.core.schema import Array, Arrays, Schema, allocate
from tidemill.streams.parameters import Subscription


class InlineInferenceClient(InferenceClient):
    """The inline client answers from its own copy of the policy. A single request is
    answered from the caller's arrays without a copy; several are joined first.

    `parameters` keeps it supplied; None: its weights stay. `answer` and `state` are the
    policy's schemas, `rows` the most rows that are ever posted at once.
    """

    def __init__(
        self,
        policy: Policy,
        policy_index: int,
        parameters: Subscription | None,
        answer: Schema,
        state: Schema,
        observation: Schema,
        rows: int,
        clock: Clock,
    ) -> None:
        self._policy, self._policy_index, self._parameters = policy, policy_index, parameters
        self._clock = clock
        self._posted: list[tuple[int, Arrays, Arrays, bool | Array]] = []
        self._answers: dict[int, tuple[Answer, Arrays]] = {}
        self._number = 0
        self._answer_schema, self._rows = {**answer, **state}, rows
        self._observation = allocate(observation, (rows,))
        self._state = allocate(state, (rows,))
        self._free: list[Arrays] = []  # answer buffers; there are never more than requests in flight
        # id of a buffer that answers several requests → those not yet consumed
        self._shared: dict[int, int] = {}

    @property
    def version(self) -> int:
        """The version that answers now."""
        return self._policy.version

    @property
    def counters(self) -> Mapping[str, float]:
        """What was pushed with that version; see `Subscription.counters`."""
        return {} if self._parameters is None else self._parameters.counters

    @property
    def buffered(self) -> int:
        return len(self._posted)

    def post_request(self, observation: Arrays, state: Arrays, deterministic: bool | Array) -> int:
        self._number += 1
        self._posted.append((self._number, observation, state, deterministic))
        return self._number

    def flush(self) -> None:
        posted = self._posted
        if not posted:
            return
        left = self._clock.enter("inference")
        if len(posted) == 1:
            number, observation, state, deterministic = posted[0]
            out = self._act(observation, state, deterministic)
            self._answers[number] = Answer(out, self._policy.version, self._policy_index), out
        else:
            self._flush_joined()
        posted.clear()
        self._clock.enter(left)

    def _act(self, observation: Arrays, state: Arrays, deterministic: bool | Array) -> Arrays:
        out = self._free.pop() if self._free else allocate(self._answer_schema, (self._rows,))
        try:
            self._policy.act(observation, state, deterministic, out)
        except (KeyError, ValueError) as error:
            raise misfit(self._policy, out, error) from error
        if state:
            check_next_state(self._policy, state, out)
        return out

    def _flush_joined(self) -> None:
        ends = np.cumsum([rows_of(observation) for _, observation, _, _ in self._posted]).tolist()
        spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        flags = np.zeros(ends[-1], np.bool_)
        for span, (_, observation, state, deterministic) in zip(spans, self._posted, strict=True):
            flags[span] = deterministic
            for name, array in observation.items():
                self._observation[name][span] = array
            for name, array in state.items():
                self._state[name][span] = array
        observation, state = (
            {name: array[: ends[-1]] for name, array in part.items()}
            for part in (self._observation, self._state)
        )
        out = self._act(observation, state, flags if flags.any() else False)
        for span, (number, _, _, _) in zip(spans, self._posted, strict=True):
            fields = {name: array[span] for name, array in out.items()}
            self._answers[number] = Answer(fields, self._policy.version, self._policy_index), out
        self._shared[id(out)] = len(self._posted)

    def is_ready(self, request: int) -> bool:
        return request in self._answers

    def consume_result(self, request: int) -> Answer:
        answer, out = self._answers.pop(request)
        left = self._shared.pop(id(out), 1) - 1
        if left:
            self._shared[id(out)] = left
        else:
            self._free.append(out)  # for the next flush: the caller has copied by then
        return answer

    def reseed(self, seed: int) -> None:
        """Draw what answers need from `seed` from now on."""
        self._policy.reseed(seed)

    def refresh(self) -> None:
        if self._parameters is not None:
            self._parameters.refresh(self._policy)

    def state(self) -> Part:
        policy = self._policy
        posted = {
            str(number): {"observation": observation, "state": state, "deterministic": deterministic}
            for number, observation, state, deterministic in self._posted
        }
        answers = {
            str(number): {"fields": answer.fields, "version": answer.version}
            for number, (answer, _) in self._answers.items()
        }
        return {
            "number": self._number,
            "posted": posted,
            "answers": answers,
            "version": policy.version,
            "parameters": policy.parameters(),
            "random": policy.random_state(),
            "source": {} if self._parameters is None else self._parameters.state(),
        }

    def load_state(self, state: Part) -> None:
        self._number = state["number"]
        self._posted[:] = [
            (int(number), asked["observation"], asked.get("state", {}), asked["deterministic"])
            for number, asked in sorted(state["posted"].items(), key=lambda item: int(item[0]))
        ]
        for number, held in state["answers"].items():
            out = allocate(self._answer_schema, (self._rows,))
            rows = rows_of(held["fields"])
            for name, array in held["fields"].items():
                out[name][:rows] = array
            fields = {name: array[:rows] for name, array in out.items()}
            self._answers[int(number)] = Answer(fields, held["version"], self._policy_index), out
        self._policy.load(state["parameters"], state["version"])
        self._policy.set_random_state(state["random"])
        if self._parameters is not None:
            self._parameters.load_state(state.get("source", {}))


def rows_of(arrays: Arrays) -> int:
    """Return the number of rows of a request's arrays."""
    return len(next(iter(arrays.values())))
