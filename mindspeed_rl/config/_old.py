from mindspeed_rl.config.placement import RolloutLayout

num_devices=lambda cfg: cfg.placement.num_devices
own_critic_devices=lambda cfg: cfg.placement.dedicated.get("critic")
own_reference_devices=lambda cfg: cfg.placement.dedicated.get("ref")
own_reward_devices=lambda cfg: cfg.placement.dedicated.get("reward")
own_rollout_devices=lambda cfg: cfg.placement.dedicated.get("rollout")
rollout_is_apart=lambda cfg: cfg.placement.disaggregated
rollout_servers=lambda cfg: list(cfg.placement.servers)
resolve_objective=lambda cfg: cfg.objective
rollout_layout=RolloutLayout.from_config
