"""The page that says what rl-zoo's settings are here: every key of its files has a row,
and all that stands there exists."""

import dataclasses
import re
from pathlib import Path

import pytest

import tidemill
from tidemill.api.limits import Limits
from tidemill.core.config import Config
from tidemill.core.errors import ConfigError
from tidemill.core.foreign_names import FOREIGN_NAMES, WITHOUT_NAMES
from tidemill.envs.wrapping import WRAPPERS, read_wrapper

PAGE = (Path(__file__).parents[2] / "docs" / "rl-zoo.md").read_text()
# the keys of rl_zoo3 2.9.2's hyperparams/*.yml, and of their policy_kwargs
KEYS = {
    "All algorithms": """n_timesteps policy n_envs env_wrapper frame_stack learning_rate gamma normalize
        policy_kwargs net_arch activation_fn""",
    "PPO, PPO with an LSTM, A2C": """n_steps n_epochs batch_size clip_range vf_coef ent_coef gae_lambda
        use_sde sde_sample_freq max_grad_norm log_std_init ortho_init enable_critic_lstm lstm_hidden_size
        use_rms_prop normalize_advantage optimizer_class optimizer_kwargs eps""",
    "DQN, QR-DQN": """buffer_size batch_size learning_starts target_update_interval train_freq gradient_steps
        exploration_fraction exploration_final_eps optimize_memory_usage n_quantiles""",
    "SAC, TD3": """buffer_size batch_size ent_coef train_freq gradient_steps tau learning_starts use_sde
        log_std_init use_expln use_sde_at_warmup replay_buffer_class replay_buffer_kwargs noise_type
        noise_std""",
    "Missing algorithms": """alive_bonus_offset delta_std n_delta n_top zero_policy cg_damping cg_max_steps
        n_critic_updates sub_sampling_factor top_quantiles_to_drop_per_net goal_selection_strategy
        max_episode_length model_class n_sampled_goal online_sampling""",
}


def rows_of(section: str) -> dict[str, tuple[str, ...]]:
    """Return the rows of a section's table, by their first cell."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    return {first.strip("`"): tuple(others) for first, *others in rows[2:]}


@pytest.mark.parametrize("section", KEYS)
def test_every_key_of_the_zoos_files_has_a_row(section: str) -> None:
    assert not set(KEYS[section].split()) - set(rows_of(section))


def kind_called(name: str) -> type[Config]:
    found: type[Config] = Limits if name == "Limits" else getattr(tidemill, name)
    return found


@pytest.mark.parametrize("section", KEYS)
def test_what_stands_there_exists_and_is_what_users_are_told(section: str) -> None:
    for theirs, (ours, value) in rows_of(section).items():
        told = re.findall(r"`([A-Z]\w+)\.(\w+)`", f"{ours} {value}")
        for kind, setting in told:
            assert setting in [each.name for each in dataclasses.fields(kind_called(kind))], (theirs, setting)
        if not re.fullmatch(r"`\w+\.\w+`", ours):
            assert ours == "–" and value, theirs
            continue
        _, setting = told[0]
        if theirs != setting and (section, theirs) != ("SAC, TD3", "ent_coef"):
            assert setting in FOREIGN_NAMES[theirs], (theirs, setting)


def test_every_name_that_users_are_told_of_has_a_row() -> None:
    rows = [name for section in KEYS for name in rows_of(section)]
    assert set(FOREIGN_NAMES) - set(rows) == {"total_timesteps"}
    unlike = {theirs for section in KEYS for theirs, (ours, _) in rows_of(section).items() if ours == "–"}
    assert unlike == set(WITHOUT_NAMES)


def test_the_wrappers_of_the_page_are_there() -> None:
    for theirs, (ours,) in rows_of("Wrappers").items():
        if ours != "missing" and "Atari" not in ours:
            text = ours.strip("`")
            assert text.partition("(")[0] in WRAPPERS and read_wrapper(text).place, theirs


def test_the_commands_of_the_page_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    from tidemill.core.config import set_path
    from tidemill.presets.experiments import experiment_for

    experiment = experiment_for("Hopper-v5", tidemill.Gymnasium(id="Hopper-v5"), "ppo")
    for path, value in re.findall(r"--set (\S+?)=('\{.*?\}'|\S+)", PAGE):
        experiment = set_path(experiment, path, value.strip("'"))
    assert experiment.workers["trainer"].algorithm.learning_rate == tidemill.LinearSchedule(9.8e-05, 0)


def test_their_names_are_answered_by_ours() -> None:
    with pytest.raises(ConfigError, match='PPO has no setting ent_coef; did you mean "entropy_coefficient"'):
        tidemill.PPO(ent_coef=0.01)  # type: ignore[call-arg]
    with pytest.raises(
        ConfigError, match=r'it is called "lanes" here, and stands elsewhere: docs/rl-zoo\.md'
    ):
        tidemill.PPO(n_envs=8)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match='SAC has no setting ent_coef; did you mean "temperature"'):
        tidemill.SAC(ent_coef="auto")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match='nothing here has a setting clip_range; did you mean "clip"'):
        tidemill.train("CartPole-v1", clip_range=0.1)
    with pytest.raises(
        ConfigError, match=r"policy_kwargs; its parts are settings of their own, such as hidden"
    ):
        tidemill.train("CartPole-v1", policy_kwargs={"net_arch": [64, 64]})
    with pytest.raises(ConfigError, match=r"policy = 'MlpPolicy' is not needed here: the network follows"):
        tidemill.train("CartPole-v1", policy="MlpPolicy")
    with pytest.raises(
        ConfigError, match="PPO has no setting cg_damping; it is TRPO's, which is missing here"
    ):
        tidemill.PPO(cg_damping=0.1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="PPO has no setting use_rms_prop; Adam is the only optimiser"):
        tidemill.PPO(use_rms_prop=True)  # type: ignore[call-arg]
