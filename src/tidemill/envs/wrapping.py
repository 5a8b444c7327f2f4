"""Wrappers of Gymnasium that a user names: which there are, how they are written, and how
an environment gets into them.

A wrapper is written as a call with plain values, or as its name alone:

    flatten                                        one of `WRAPPERS`
    frame-skip(4), time-limit(max_episode_steps=200)
    gymnasium.wrappers:TimeLimit(max_episode_steps=200), my_file.py:MyWrapper
    gymnasium.wrappers.TimeLimit(200)              as other libraries write it

Nothing of it is evaluated: values are Python's literals.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from tidemill.api.external_code import Outside, names_nothing, quoted
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.core.named_class import read_call
from tidemill.core.user_code_loading import name_of_code
from tidemill.envs.gymnasium_registry import call_maker, load_maker

_OURS, _IMAGES = "tidemill.envs.single_wrappers", "tidemill.envs.image_wrappers"
_GYMNASIUM = "gymnasium.wrappers"
WRAPPERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "clip-action": (f"{_GYMNASIUM}:ClipAction", {}),
    "clip-reward": (f"{_GYMNASIUM}:ClipReward", {"min_reward": -1, "max_reward": 1}),
    "filter": (f"{_GYMNASIUM}:FilterObservation", {}),
    "flatten": (f"{_GYMNASIUM}:FlattenObservation", {}),
    "frame-skip": (f"{_OURS}:FrameSkip", {}),
    "frame-stack": (f"{_OURS}:StackedFrames", {}),
    "grayscale": (f"{_IMAGES}:GrayImages", {}),
    "history": (f"{_OURS}:ObservationHistory", {}),
    "mask-velocity": (f"{_OURS}:MaskVelocity", {}),
    "minigrid-flat": ("minigrid.wrappers:FlatObsWrapper", {}),
    "minigrid-image": ("minigrid.wrappers:ImgObsWrapper", {}),
    "record-statistics": (f"{_GYMNASIUM}:RecordEpisodeStatistics", {}),
    "rescale-action": (f"{_GYMNASIUM}:RescaleAction", {"min_action": -1.0, "max_action": 1.0}),
    "resize": (f"{_IMAGES}:ResizedImages", {}),
    "sticky-action": (f"{_GYMNASIUM}:StickyAction", {"repeat_action_probability": 0.25}),
    "time-feature": (f"{_GYMNASIUM}:TimeAwareObservation", {"normalize_time": True}),
    "time-limit": (f"{_GYMNASIUM}:TimeLimit", {}),
}
"""By name: where a wrapper is, and what it is given where nobody says otherwise."""
_ELSEWHERE = {
    **{place.rpartition(":")[2]: name for name, (place, _) in WRAPPERS.items()},
    "HistoryWrapper": "history",
    "MaskVelocityWrapper": "mask-velocity",
    "TimeFeatureWrapper": "time-feature",
    "GrayScaleObservation": "grayscale",
    "GrayscaleObservation": "grayscale",
    "ResizeObservation": "resize",
    "YAMLCompatResizeObservation": "resize",
}
"""By classes of other libraries: which of `WRAPPERS` does the same."""
LONGEST = 2000


class WrapperCall(NamedTuple):
    """A wrapper call is what the text of a wrapper says.

    text: that text
    place: where the wrapper is, "module:NAME" or "FILE.py:NAME"
    args, kwargs: what it is made with besides the environment
    """

    text: str
    place: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def read_wrapper(text: str) -> WrapperCall:
    """Return what `text` says. Raises `ConfigError` for what is no call with plain
    values, and for a name that nobody knows."""
    if len(text) > LONGEST:
        raise ConfigError(f"wrapper {text[:100]} …: {len(text):,} characters; {LONGEST:,} may be there")
    name, args, kwargs = read_call(text, "wrapper")
    if name in WRAPPERS:
        place, usual = WRAPPERS[name]
        # a value that comes without its name is the first
        usual = dict(list(usual.items())[len(args) :])
        return WrapperCall(text, place, args, {**usual, **kwargs})
    if ":" not in name:
        if "." not in name or name.endswith(".py"):
            raise ConfigError(
                f'no wrapper is called "{name}"; {did_you_mean(name, WRAPPERS)}, or one of your own: '
                "module:NAME or FILE.py:NAME"
            )
        module, _, attribute = name.rpartition(".")
        name = f"{module}:{attribute}"
    return WrapperCall(text, name, args, kwargs)


def names_of(wrappers: Any) -> tuple[str, ...]:
    """Return wrappers as texts: a class or function by its name. Raises `ConfigError` for
    what is none."""
    given = [wrappers] if isinstance(wrappers, str) or callable(wrappers) else wrappers
    if not isinstance(given, Sequence):
        raise ConfigError(f"wrap = {wrappers!r} must be a list of wrappers")
    texts = tuple(map(name_of_code, given))
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError(
                f'wrap: {text!r} is no wrapper; write its name, as "frame-skip(4)", or give the class or a '
                "function that takes the environment"
            )
        read_wrapper(text)
    return texts


def wrapped(env: Any, texts: Sequence[str], name: str, *kinds: type) -> Any:
    """Return `env`, which messages call `name`, in these wrappers, the first one inside;
    each returns one of these `kinds`. Raises `ConfigError`, with `env` closed, for one
    that is not there or does not fit."""
    try:
        for text in texts:
            call = read_wrapper(text)
            maker, inner = _load(call), env

            def wrap(maker: Callable[..., Any] = maker, call: WrapperCall = call, inner: Any = inner) -> Any:
                return maker(inner, *call.args, **call.kwargs)

            env = call_maker(wrap, f"{name} in the wrapper {text}", maker, {})
            if not isinstance(env, kinds):
                names = " and no ".join(
                    f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in kinds
                )
                raise ConfigError(f"wrap: {text} returned {env!r}, which is no {names}")
    except BaseException:
        if isinstance(env, kinds):
            closing: Any = env
            closing.close()
        raise
    return env


def _load(call: WrapperCall) -> Callable[..., Any]:
    try:
        return load_maker(call.place, "a gymnasium.Wrapper", "wrap")
    except ConfigError as error:
        root = call.place.partition(":")[0].partition(".")[0]
        same = _ELSEWHERE.get(call.place.rpartition(":")[2])
        if call.place.startswith("minigrid.") and find_spec(root) is None:
            raise ConfigError(f'wrap: {call.text} needs a package: pip install "minigrid"') from None
        if same is None:
            raise
        raise ConfigError(f'{error}. Here it is called "{same}"') from None


def outside_wrappers(texts: Any) -> list[Outside]:
    """Return what is `Outside` in the setting `wrap`, which nobody has checked."""
    found = []
    for text in texts if isinstance(texts, list) else [texts] if texts else []:
        try:
            call = read_wrapper(text)
        except (ConfigError, TypeError):
            found.append(Outside(f"wraps it in {quoted(text)}"))
            continue
        if call.place not in {place for place, _ in WRAPPERS.values()}:
            found.append(Outside(f"wraps it in {quoted(text)}", call.place))
        elif not (names_nothing(call.kwargs) and names_nothing(call.args)):
            found.append(Outside(f"wraps it in {quoted(text)}"))
    return found
