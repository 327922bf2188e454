"""The phases of a run: one record each with the names that driver, workers, data plane, profiler and memory ledger use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Phase:
    """One phase; a name is empty where the phase does not need it.

    Attributes:
        name: method of the workers that run it; messages and heartbeats show it.
        deadline: key of `rl_config.deadlines` that limits the wait for it.
        timer: its intervals; shown as `timing/<timer>`.
        memory: its name in the ledger of device memory, and in the planner.
        transient: owner of the memory that exists only within the phase.
        profiler_stage: its name in `profiler_config.integrated.stage`.
        consumer: its name at the data plane.
        columns: columns that it puts into the data plane.
        dispatch_key: key of `rl_config` with the rows that a replica takes at once.
    """

    name: str
    deadline: str = "update"
    timer: str = ""
    memory: str = ""
    transient: str = "activations"
    profiler_stage: str = ""
    consumer: str = ""
    columns: tuple[str, ...] = ()
    dispatch_key: str = ""


class Phases:
    """The phases, by the names that the package uses."""

    # ---------------------------------------------------------------------- the rollout

    GENERATE = Phase(
        "generate",
        deadline="generate",
        timer="rollout",
        memory="generate",
        transient="engine step",
        profiler_stage="actor_generate",
        consumer="actor_rollout",
        columns=(
            "responses",
            "response_mask",
            "rollout_log_probs",
            "weight_versions",
            "input_ids",
            "sequence_lengths",
            "truncated",
            "trajectories",
        ),
        dispatch_key="actor_rollout_dispatch_size",
    )
    #: responses that grow over several rollouts
    CONTINUE_RESPONSES = replace(GENERATE, name="continue_responses", consumer="", columns=())
    #: responses to given prompts, which no row trains on
    GENERATE_RESPONSES = Phase("generate_responses", deadline="generate")
    FINISH_ROLLOUT = Phase("finish_rollout", deadline="generate", timer="resharding_to_train")
    PUSH_WEIGHTS = Phase(
        "push_weights", deadline="weights", timer="resharding_to_infer", memory="update_weights", transient="push buckets"
    )
    START_SERVERS = Phase("start_servers", deadline="start")
    #: the running responses end first, or are interrupted
    PAUSE_SERVERS = Phase("pause_servers", deadline="generate")
    #: calls of rollout servers, of which each has its own deadline
    CALL_SERVERS = Phase("call_servers", deadline="generate")
    JOIN_SERVERS = Phase("join_servers", deadline="weights")
    SEND_WEIGHTS = replace(PUSH_WEIGHTS, name="send_weights")
    LEAVE_SERVERS = Phase("leave_servers", deadline="weights")
    #: training state leaves the trainers' devices, on which servers are to generate
    RELEASE_DEVICES = Phase("release_devices", deadline="weights")

    # ---------------------------------------------------------------------- rewards

    RULE_REWARDS = Phase(
        "score",
        deadline="rewards",
        timer="rule_reward",
        consumer="rule_reward",
        columns=("rewards", "reward_results"),
        dispatch_key="reward_dispatch_size",
    )
    SCORE_NOW = Phase("score_now", deadline="rewards")
    MODEL_REWARDS = Phase(
        "compute_model_rewards",
        deadline="rewards",
        timer="reward_model",
        memory="reward model pass",
        consumer="reward_scores",
        columns=("rm_scores",),
    )
    #: the reward model's scores of given responses
    MODEL_SCORES = Phase("score", deadline="rewards")

    #: replies of a generative judge that the run serves
    JUDGE = Phase("judge", deadline="rewards", timer="judge", memory="judge pass", consumer="judge_scores")
    #: the engines' memory, after a judge had it during a rollout
    RESTORE_ROLLOUT = Phase("restore_rollout", deadline="weights")

    # ---------------------------------------------------------------------- passes and updates of the trained models

    ACTOR_LOG_PROBS = Phase(
        "compute_log_probs",
        deadline="log_probs",
        timer="old_log_p",
        memory="log-probs",
        profiler_stage="actor_compute_log_prob",
        consumer="actor_log_prob",
        columns=("old_log_probs", "entropies", "squared_probs"),  # the last where an estimator needs it
        dispatch_key="actor_logprob_dispatch_size",
    )
    UPDATE_ACTOR = Phase(
        "update_actor",
        timer="update",
        memory="update",
        profiler_stage="actor_update",
        consumer="actor_train",
        columns=("update_log_probs",),  # in iterations whose completions are written, or whose update is compared
    )
    REF_LOG_PROBS = Phase(
        "compute_log_probs",
        deadline="log_probs",
        timer="reference_model",
        memory="reference pass",
        profiler_stage="reference_compute_log_prob",
        consumer="ref_log_prob",
        columns=("ref_log_probs",),
        dispatch_key="ref_dispatch_size",
    )
    TEACHER_LOG_PROBS = Phase(
        "compute_teacher_log_probs",
        deadline="log_probs",
        timer="teacher_model",
        memory="teacher pass",
        consumer="teacher_log_prob",
        columns=("teacher_log_probs", "teacher_ids"),
    )
    VALUES = Phase(
        "compute_values",
        deadline="log_probs",
        timer="critic_model",
        memory="critic pass",
        profiler_stage="critic_compute_values",
        consumer="critic_compute_values",
        columns=("values",),
        dispatch_key="critic_value_dispatch_size",
    )
    UPDATE_CRITIC = Phase(
        "update_critic", timer="update_critic", memory="update critic", profiler_stage="critic_update", consumer="critic_train"
    )
    SYNC_REF = Phase("sync_reference")
    #: an iteration of a supervised stage: the pass of its reference, and a step
    TRAIN = replace(UPDATE_ACTOR, name="train", timer="", consumer="", columns=())
    TRAIN_STEP = Phase("train", timer=UPDATE_ACTOR.timer)
    EVALUATE = Phase("evaluate", deadline="evaluate", timer="evaluate", memory="evaluate")
    #: answers of a supervised stage to held-out prompts
    GENERATE_ANSWERS = Phase("generate_answers", deadline="evaluate", timer="evaluate_answers", memory="evaluate")

    # ---------------------------------------------------------------------- start, checkpoints

    PLACE = Phase("place", deadline="placement")
    SET_UP = Phase("set_up", deadline="start")
    RESUMED_STATE = Phase("resumed_state", deadline="start")
    DATA = Phase("data", deadline="start")
    CHECK_REWARDS = Phase("check", deadline="start")
    SAVE = Phase("save", deadline="save", timer="save", memory="save", transient="copies")
    FINISH = Phase("finish", deadline="save")

    # ---------------------------------------------------------------------- engines that generate for a user

    ADD_REQUESTS = Phase("add_requests", deadline="generate")
    TAKE_TOKENS = Phase("take_tokens", deadline="generate")
    CANCEL = Phase("cancel", deadline="generate")
    NEXT_TOKENS = Phase("next_tokens", deadline="generate")


ALL_PHASES = tuple(phase for phase in vars(Phases).values() if isinstance(phase, Phase))
#: name of a phase -> key of `rl_config.deadlines`; phases of other workers have the update's
PHASE_DEADLINES: Mapping[str, str] = {phase.name: phase.deadline for phase in ALL_PHASES}
