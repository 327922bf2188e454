"""Every formula once more, in float64 NumPy with one loop per sum. Written from the papers; shares no code with the package."""

from __future__ import annotations

import math

import numpy as np


def _mean(numbers):
    return sum(numbers) / len(numbers)


def _std(numbers):
    mean = _mean(numbers)
    return math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))


def _spread(scores, mask):
    out = np.zeros(mask.shape)
    for i, row in enumerate(mask):
        for t, here in enumerate(row):
            if here:
                out[i, t] = scores[i]
    return out


def _whiten(values, mask):
    tokens = [values[i, t] for i, t in zip(*np.nonzero(mask))]
    mean, var = _mean(tokens), _std(tokens) ** 2
    out = np.zeros(mask.shape)
    for i, t in zip(*np.nonzero(mask)):
        out[i, t] = (values[i, t] - mean) / math.sqrt(var + 1e-8)
    return out


def _groups(scores, size):
    return [list(scores[k : k + size]) for k in range(0, len(scores), size)]


def _scores(rewards, mask, kl, kl_coef):
    return [r - kl_coef * sum(kl[i, t] for t in np.nonzero(mask[i])[0]) for i, r in enumerate(rewards)]


def _returns(rewards, mask, kl, kl_coef, gamma):
    out = np.zeros(mask.shape)
    for i in range(len(rewards)):
        tokens = list(np.nonzero(mask[i])[0])
        for position, t in enumerate(tokens):
            for later, s in enumerate(tokens[position:]):
                rho = (rewards[i] if s == tokens[-1] else 0.0) - kl_coef * kl[i, s]
                out[i, t] += gamma**later * rho
    return out


def _optimal_token_baseline(returns, mask, size, old, squares):
    out = np.zeros(mask.shape)
    for first in range(0, len(mask), size):
        rows = range(first, first + size)
        tokens = {i: list(np.nonzero(mask[i])[0]) for i in rows}
        for i in rows:
            for position, t in enumerate(tokens[i]):
                others = [j for j in rows if len(tokens[j]) > position]
                top = bottom = 0.0
                for j in others:
                    w = sum(1 - 2 * math.exp(old[j, s]) + squares[j, s] for s in tokens[j][: position + 1])
                    top, bottom = top + returns[j, tokens[j][position]] * w, bottom + w
                out[i, t] = returns[i, t] - (top / (bottom + 1e-8) if len(others) > 1 else 0.0)
    return out


def advantages(
    name, *, rewards, mask, size, kl, kl_coef, values, greedy, components, weights, gamma, lam, scale, eps, old, squares
):
    scores = _scores(rewards, mask, kl, kl_coef)
    if name == "group_norm":
        out = []
        for group in _groups(scores, size):
            for score in group:
                centred = score - _mean(group)
                if scale == "group":
                    centred /= _std(group) + eps
                if scale == "batch":
                    centred /= _std(scores) + eps
                out.append(centred)
        return _spread(out, mask)
    if name == "rloo":
        out = []
        for group in _groups(scores, size):
            for j, score in enumerate(group):
                out.append(score - _mean(group[:j] + group[j + 1 :]))
        return _spread(out, mask)
    if name == "group_norm_whitened":
        out = [(s - _mean(g)) / (_std(g) + eps if scale == "group" else 1.0) for g in _groups(scores, size) for s in g]
        tokens = [value for value, row in zip(out, mask) for _ in range(int(row.sum()))]
        return _spread([(value - _mean(tokens)) / (_std(tokens) + eps) for value in out], mask)
    if name == "opo":
        out = []
        for first in range(0, len(scores), size):
            rows = range(first, first + size)
            length = sum(int(mask[i].sum()) for i in rows)
            baseline = sum(int(mask[i].sum()) * scores[i] for i in rows) / length
            out += [scores[i] - baseline for i in rows]
        return _spread(out, mask)
    if name == "pass_at_k":
        out = []
        for group in _groups(scores, size):
            first, second = sorted(group, reverse=True)[:2]
            lead = (first - second) / (_std(group) + eps if scale == "group" else 1.0)
            out += [lead if score == first else 0.0 for score in group]
        return _spread(out, mask)
    if name == "gpg":
        factor = len(scores) / sum(score != 0 for score in scores)
        return _spread([factor * (score - _mean(group)) for group in _groups(scores, size) for score in group], mask)
    if name == "max_rl":
        out = []
        for group in _groups(scores, size):
            out += [(score - _mean(group)) / _mean(group) if _mean(group) else 0.0 for score in group]
        return _spread(out, mask)
    if name == "flash_reinforce":
        return _spread([score - _mean(scores) for score in scores], mask)
    if name == "reinforce_plus_plus":
        return _whiten(_returns(rewards, mask, kl, kl_coef, gamma), mask)
    if name == "reinforce_plus_plus_baseline":
        out = [score - _mean(group) for group in _groups(scores, size) for score in group]
        return _whiten(_spread(out, mask), mask)
    if name == "remax":
        return _returns(rewards, mask, kl, kl_coef, gamma) - _spread(greedy, mask)
    if name == "gae":
        return _whiten(_gae(rewards, mask, kl, kl_coef, values, gamma, lam), mask)
    if name == "grouped_gae":
        raw, parts = _gae(rewards, mask, kl, kl_coef, values, gamma, lam), []
        for first in range(0, len(rewards), size):
            rows = slice(first, first + size)
            parts.append(_whiten(raw[rows], mask[rows]))
        return np.concatenate(parts)
    if name == "optimal_token_baseline":
        return _optimal_token_baseline(_returns(rewards, mask, kl, kl_coef, 1.0), mask, size, old, squares)
    if name == "gdpo":
        totals = np.zeros(len(rewards))
        for k, weight in enumerate(weights):
            column = []
            for group in _groups(components[:, k], size):
                column += [(x - _mean(group)) / (_std(group) + eps) for x in group]
            totals += weight * np.array(column)
        return _spread([(x - _mean(list(totals))) / (_std(list(totals)) + eps) for x in totals], mask)
    raise KeyError(name)


def _gae(rewards, mask, kl, kl_coef, values, gamma, lam):
    out = np.zeros(mask.shape)
    for i in range(len(rewards)):
        tokens = list(np.nonzero(mask[i])[0])
        deltas = []
        for position, t in enumerate(tokens):
            last = position == len(tokens) - 1
            after = 0.0 if last else values[i, tokens[position + 1]]
            deltas.append((rewards[i] if last else 0.0) - kl_coef * kl[i, t] + gamma * after - values[i, t])
        for position, t in enumerate(tokens):
            out[i, t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[position:]))
    return out


def kl(x, kind, clamp=False, x_fixed=None):
    """x_fixed: x at the point where the gradient is taken, for the forms that stop it."""
    x_fixed = x if x_fixed is None else x_fixed
    if kind in ("k1", "kl"):
        return x
    if kind == "abs":
        return abs(x)
    if kind in ("k2", "mse"):
        return x * x / 2
    if kind in ("k3", "low_var_kl"):
        if clamp:
            x = min(max(x, -20.0), 20.0)
            return min(max(math.exp(-x) + x - 1, -10.0), 10.0)
        return math.exp(-x) + x - 1
    if kind in ("k3+", "low_var_kl+"):
        return x * x / 2 + (math.exp(-x_fixed) + x_fixed - 1 - x_fixed**2 / 2)
    raise KeyError(kind)


def rollout_weight(differences, mode, high, low):
    """Weights of the tokens of one row."""
    tokens = [math.exp(d) for d in differences]
    product, geometric = math.exp(sum(differences)), math.exp(_mean(differences))
    out = []
    for token in tokens:
        level, _, action = mode.rpartition("_")
        scope = level.removesuffix("_rejection")
        weight = {"token": token, "token_geometric": token, "sequence": product, "geometric": geometric}[scope]
        weight = weight if scope == level else 1.0
        tested = {"token": token, "token_geometric": geometric, "sequence": product, "geometric": geometric}[scope]
        if action == "truncate":
            out.append(min(weight, high))
        else:
            out.append(weight if (low or 0.0) <= tested <= high else 0.0)
    return out


OBJECTIVE = {name: "clip" for name in ("grpo", "bnpo", "dapo", "dr_grpo", "gspo", "luspo")} | {
    "cispo": "cispo",
    "cispo_cap": "cispo_cap",
    "sapo": "sapo",
}
NORMALIZER = {
    "grpo": "sequence",
    "gspo": "sequence",
    "sapo": "sequence",
    "bnpo": "token",
    "dapo": "token",
    "cispo": "token",
    "cispo_cap": "token",
    "dr_grpo": "constant",
    "luspo": "summed",
    "gmpo": "sequence",
    "real": "sequence",
    "online_dpo": "sequence",
    **{name: "token" for name in ("gpg", "dppo_tv", "dppo_kl", "vespo", "fipo", "dro", "clip_cov", "kl_cov")},
}


def objective(name, r, r_fixed, log_prob, a, s):
    low, high = s.get("clip_ratio_low", 0.2), s.get("clip_ratio_high", 0.2)
    if name == "clip":
        free = min(r, s["delta"]) * a if s.get("delta") else r * a
        loss = -min(free, min(max(r, 1 - low), 1 + high) * a)
        if s.get("clip_ratio_c") and a < 0:
            loss = min(loss, -s["clip_ratio_c"] * a)
        return loss
    if name == "cispo":
        return -min(max(r_fixed, 1 - low), 1 + high) * a * log_prob
    if name == "cispo_cap":
        return -min(r_fixed, high) * a * log_prob
    tau = s.get("tau_pos", 1.0) if a > 0 else s.get("tau_neg", 1.05)
    return -4 / tau / (1 + math.exp(-tau * (r - 1))) * a


def real(log_probs, b, old, group, s):
    """The loss that all tokens of the responses of a prompt share; group: their rows."""
    right = wrong = 1.0
    kinds = set()
    for i in group:
        where = np.nonzero(b["loss_mask"][i])[0]
        if len(where):
            score = _mean([log_probs[i, t] - old[i][t] for t in where]) / s.get("real_tau", 0.5)
            gains = _mean([b["advantages"][i, t] for t in where]) > 0
            kinds.add(gains)
            right, wrong = right + (math.exp(-score) if gains else 0.0), wrong + (0.0 if gains else math.exp(score))
    return math.log(right) + math.log(wrong) if len(kinds) == 2 else 0.0


def online_dpo(log_probs, b, group, s):
    """The loss that all tokens of the responses of a prompt share."""
    beta, rows = s.get("online_dpo_beta", 0.1), []
    for i in group:
        where = np.nonzero(b["loss_mask"][i])[0]
        if len(where):
            rows.append((_mean([b["advantages"][i, t] for t in where]), sum(log_probs[i, t] - b["ref"][i, t] for t in where)))
    if not rows or max(rows)[0] == min(rows)[0]:
        return 0.0
    z = max(rows)[1] - min(rows)[1]
    if s.get("online_dpo_loss_type") == "ipo":
        return (z - 1 / (2 * beta)) ** 2
    return math.log(1 + math.exp(-beta * z))


def paper_losses(name, new, at, old, advantages, s, marked):
    """Losses of the tokens of one row; `at`: the log-probs at which the gradient is taken; lists of positions or None."""
    low, high = s.get("clip_ratio_low", 0.2), s.get("clip_ratio_high", 0.2)
    here = [t for t, value in enumerate(new) if value is not None]
    if name == "gmpo":
        a = _mean([advantages[t] for t in here])
        logs = [min(new[t] - old[t], high) if a > 0 else max(new[t] - old[t], -low) for t in here]
        return {t: -a * math.exp(_mean(logs)) for t in here}
    if name == "vespo":
        w = math.exp(min(max(sum(at[t] - old[t] for t in here), math.log(1e-8)), 20.0))
        out = {}
        for t in here:
            k, rate = (2.0, 3.0) if advantages[t] >= 0 else (3.0, 2.0)
            out[t] = -(w**k) * math.exp(rate * (1 - w)) * advantages[t] * new[t]
        return out
    out = {}
    for t in here:
        a, p, q = advantages[t], math.exp(at[t]), math.exp(old[t])
        if name == "gpg":
            out[t] = -a * new[t]
        elif name == "clip_cov":
            out[t] = 0.0 if marked[t] else objective("clip", math.exp(new[t] - old[t]), None, new[t], a, s)
        elif name == "kl_cov":
            # the slope of |x| at 0 is 0
            kept = s.get("ppo_kl_coef", 1.0) * abs(new[t] - old[t]) if marked[t] and at[t] != old[t] else 0.0
            out[t] = -math.exp(new[t] - old[t]) * a + kept
        elif name == "dro":
            out[t] = -a * new[t] + s.get("dro_beta", 1.0) / 2 * (new[t] - old[t]) ** 2
        elif name == "dppo_tv":
            far = p - q > high if a > 0 else q - p > low
            out[t] = 0.0 if far else -min(p / q, s.get("clip_ratio_c") or math.inf) * a * new[t]
        elif name == "dppo_kl":
            kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            far = kl > high and p > q if a > 0 else kl > low and p < q
            out[t] = 0.0 if far else -min(p / q, s.get("clip_ratio_c") or math.inf) * a * new[t]
        else:
            assert name == "fipo", name
            decay = 0.5 ** (1 / s.get("fipo_decay_rate", 32.0))
            ahead = 0.0
            for k in here:
                counts = s.get("delta") is None or math.exp(at[k] - old[k]) <= s["delta"]
                ahead += decay ** (k - t) * (at[k] - old[k]) if k >= t and counts else 0.0
            weight, span = math.exp(ahead), s.get("fipo_clip_range", 0.2)
            if span < math.inf:
                weight = min(max(weight, 1.0 if s.get("fipo_clip_high_only", True) else 1 - span), 1 + span)
            if a < 0 and p / q > s.get("fipo_safety_threshold", 4.0):
                weight = min(max(weight, 0.8), 1.0)
            out[t] = weight * objective("clip", math.exp(new[t] - old[t]), None, new[t], a, s)
    return out


def policy_loss(log_probs, fixed, b, s):
    """The loss of a whole batch, divided.

    fixed: the log-probs at which the gradient is taken; perturbing only log_probs differentiates around the stop-gradients.
    b: arrays by name (advantages, response_mask, loss_mask, old, ref, rollout, entropy) and entropy_threshold.
    """
    loss_type = s["loss_type"]
    level = s.get("importance_sampling_level") or ("sequence" if loss_type in ("gspo", "luspo") else "token")
    numerator, tokens, rows = 0.0, 0, 0
    for i in range(log_probs.shape[0]):
        if not b["response_mask"][i].any():
            continue
        rows += 1
        where = list(np.nonzero(b["loss_mask"][i])[0])
        if not where:
            continue
        tokens += len(where)
        old = b["old"][i] if b["old"] is not None else fixed[i]
        mean_ratio = _mean([log_probs[i, t] - old[t] for t in where])
        mean_fixed = _mean([fixed[i, t] - old[t] for t in where])
        weights = [1.0] * len(where)
        if s.get("rollout_correction"):
            differences = [old[t] - b["rollout"][i, t] for t in where]
            weights = rollout_weight(
                differences, s["rollout_correction"], s.get("rollout_threshold", 2.0), s.get("rollout_threshold_min")
            )
        dropped = False
        if s.get("off_policy_sequence_mask_delta") is not None:
            sampler = b["rollout"][i] if b["rollout"] is not None else old
            drift = _mean([sampler[t] - fixed[i, t] for t in where])
            dropped = _mean([b["advantages"][i, t] for t in where]) < 0 and drift > s["off_policy_sequence_mask_delta"]
        row = 0.0
        for weight, t in zip(weights, where):
            log_prob, at = log_probs[i, t], fixed[i, t]
            r, r_fixed = {
                "token": (math.exp(log_prob - old[t]), math.exp(at - old[t])),
                "sequence": (math.exp(mean_ratio), math.exp(mean_fixed)),
                "sequence_token": (math.exp(log_prob - at + mean_fixed), math.exp(mean_fixed)),
            }[level]
            if loss_type in OBJECTIVE:
                loss = weight * objective(OBJECTIVE[loss_type], r, r_fixed, log_prob, b["advantages"][i, t], s)
            elif loss_type == "real":
                start = i - i % s["group_size"]
                every_old = b["old"] if b["old"] is not None else fixed
                loss = weight * real(log_probs, b, every_old, range(start, start + s["group_size"]), s)
            elif loss_type == "online_dpo":
                start = i - i % s["group_size"]
                loss = weight * online_dpo(log_probs, b, range(start, start + s["group_size"]), s)
            else:
                new = [log_probs[i, k] if k in where else None for k in range(log_probs.shape[1])]
                loss = weight * paper_losses(loss_type, new, fixed[i], old, b["advantages"][i], s, b["marked"][i])[t]
            if dropped or (b["entropy_threshold"] is not None and b["entropy"][i, t] < b["entropy_threshold"]):
                loss = 0.0
            if s.get("kl_coef"):
                x, x_at = log_prob - b["ref"][i, t], at - b["ref"][i, t]
                term = kl(x, s.get("kl_penalty", "low_var_kl"), s.get("kl_clamp", False), x_at)
                if s.get("use_bias_correction_kl"):
                    term *= math.exp(log_prob - old[t])
                loss += s["kl_coef"] * term
            if s.get("entropy_coeff"):
                loss -= s["entropy_coeff"] * b["entropy"][i, t]
            row += loss
        numerator += row / len(where) if NORMALIZER[loss_type] == "sequence" else row
    denominator = {"sequence": rows, "token": tokens, "constant": rows * s.get("max_response_length", 1), "summed": rows}
    return numerator / denominator[NORMALIZER[loss_type]]


def gradient(function, point, step=1e-6):
    """Central differences."""
    out = np.zeros_like(point)
    for index in np.ndindex(point.shape):
        up, down = point.copy(), point.copy()
        up[index] += step
        down[index] -= step
        out[index] = (function(up) - function(down)) / (2 * step)
    return out


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))
