"""The plan of a server of training (`mindspeed-rl serve`): what it offers, where, and to whom."""

from __future__ import annotations

from mindspeed_rl.run import Run

#: parts of a report that say what a loop does, which a server leaves to its clients
LOOP_PARTS: dict[str, object] = {
    "batch": {},
    "dispatch_sizes": {},
    "resources": {},
    "formula": "",
    "samples": "",
    "learning_rate": "",
    "warnings": [],
    "keys_without_effect": {},
    "missing": [],
}


def describe_server(run: Run) -> dict[str, str]:
    """Return what a server offers, a row each; empty for a run that is not a server."""
    keys, actor, generate = run.config.serve_config, run.config.actor_config, run.config.generate_config
    if keys is None:
        return {}
    is_lora = bool(actor.lora_target_modules)
    adapters = f"{keys.num_models} at the same time, adapters of rank 1 to {actor.lora_r}"
    engine = keys.num_engine_adapters or keys.num_models
    owners = "any that begins with tml-; each is a tenant of its own"
    used = f"{keys.max_tokens_in_flight} tokens in flight, {keys.max_checkpoints} checkpoints, {keys.max_checkpoint_gib:g} GiB"
    sessions = f"{keys.max_sessions} sessions of all, each ends {keys.session_timeout_s:g} s after its last heartbeat"
    return {
        "server": f"{keys.model_name or 'the name of its folder'} at http://{keys.host}:{keys.port}, by the Tinker API",
        "base": str(actor.load or actor.pretrained_checkpoint or ""),
        "models": adapters if is_lora else "one, with full weights",
        "longest": "" if generate is None else f"{generate.max_model_len} tokens, prompt and sample together",
        "passes": f"of up to {keys.max_tokens_per_pass} tokens; longer requests take several",
        "samples": "" if generate is None else f"{generate.max_num_seqs} at the same time, of {engine} models in a step",
        "losses": "cross_entropy, importance_sampling, ppo, cispo, dro, gspo; custom ones at the client",
        "api keys": f"the lines of {keys.api_keys_file}" if keys.api_keys_file else owners,
        "limits": f"{used} of an API key; {sessions}",
        "folder": f"{keys.folder}: sessions, finished operations, checkpoints; a server that is started again continues",
    }
