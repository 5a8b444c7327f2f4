"""What settings of Stable-Baselines3, and of the files of rl-zoo3, are called here.
``docs/rl-zoo.md`` says of each how its values are turned into ours."""

FOREIGN_NAMES = {
    "activation_fn": ("activation",),
    "batch_size": ("minibatch_size",),
    "buffer_size": ("capacity",),
    "clip_range": ("clip",),
    "clip_range_vf": ("clip_value",),
    "ent_coef": ("entropy_coefficient", "temperature"),
    "eps": ("adam_epsilon",),
    "env_kwargs": ("kwargs",),
    "env_wrapper": ("wrap",),
    "exploration_final_eps": ("epsilon",),
    "exploration_fraction": ("epsilon",),
    "exploration_initial_eps": ("epsilon",),
    "gradient_steps": ("ratio",),
    "learning_starts": ("warm_up",),
    "lstm_hidden_size": ("width",),
    "max_grad_norm": ("max_gradient_norm",),
    "n_envs": ("lanes",),
    "n_epochs": ("epochs",),
    "n_quantiles": ("quantiles",),
    "n_steps": ("sample_steps",),
    "n_timesteps": ("steps",),
    "net_arch": ("hidden",),
    "noise_std": ("exploration_noise",),
    "normalize": ("normalise_observations",),
    "normalize_advantage": ("normalise_advantages",),
    "ortho_init": ("initialisation",),
    "sde_sample_freq": ("sde_steps",),
    "share_features_extractor": ("shared_critic",),
    "target_policy_noise": ("target_noise",),
    "target_update_interval": ("target_steps",),
    "tau": ("target_rate",),
    "total_timesteps": ("steps",),
    "train_freq": ("ratio",),
    "use_sde": ("sde_steps",),
    "vf_coef": ("value_coefficient",),
}
"""By their name: our settings', the usual one first."""

WITHOUT_NAMES = {
    "enable_critic_lstm": "the critic always has a cell of its own",
    "n_critics": "there are always two",
    "noise_type": "noise is normal; its deviation is exploration_noise",
    "optimize_memory_usage": "an observation is always kept once",
    "optimizer_class": "Adam is the only optimiser",
    "optimizer_kwargs": "of the optimiser there are learning_rate and adam_epsilon",
    "policy": "the network follows from the spaces, and its widths are hidden=(64, 64)",
    "policy_kwargs": "its parts are settings of their own, such as hidden (net_arch) and activation "
    "(activation_fn)",
    "replay_buffer_class": "there are Replay and PrioritisedReplay; hindsight replay is missing",
    "replay_buffer_kwargs": "there are Replay and PrioritisedReplay; hindsight replay is missing",
    "use_expln": "deviations are always e to the power of what is learnt",
    "use_rms_prop": "Adam is the only optimiser",
    "use_sde_at_warmup": "steps before the first update are always the policy's",
}
"""Of their names that none of ours is for, what is so instead."""
