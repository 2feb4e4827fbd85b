"""ViSpec by loops over slots, pictures, heads and keys, in float64.

The sequence is built as a list that pictures shorten, as in the published code.
"""

from dataclasses import dataclass, field

import torch
from draft_cases import HEAD_DIM, THETA
from oracle_parts import Weights, attend, heads, linear, mlp, rms_norm, rope, softmax
from torch import Tensor

Batch = dict[str, Tensor]
Head = tuple[Tensor, Tensor]


@dataclass
class Sequence:
    """What the layer runs over."""

    inputs: list[Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    allowed: list[bool] = field(default_factory=list)

    def add(self, x: Tensor, position: int, allowed: bool) -> None:
        self.inputs.append(x)
        self.positions.append(position)
        self.allowed.append(allowed)


def layer_output(w: Weights, sequence: Sequence, here: int) -> Tensor:
    """The layer's output at entry ``here``, which sees the allowed ones before it and itself."""
    name = "layers.0.self_attn"
    keys, values = [], []
    for s in range(here + 1):
        if s == here or sequence.allowed[s]:
            x, position = sequence.inputs[s], sequence.positions[s]
            parts = heads(linear(w, f"{name}.k_proj", x), HEAD_DIM)
            keys.append([rope(part, position, THETA) for part in parts])
            values.append(heads(linear(w, f"{name}.v_proj", x), HEAD_DIM))
    x, attended = sequence.inputs[here], []
    parts = heads(linear(w, f"{name}.q_proj", x), HEAD_DIM)
    for h, part in enumerate(parts):
        shared = h // (len(parts) // len(keys[0]))
        query = rope(part, sequence.positions[here], THETA)
        attended.append(attend(query, [k[shared] for k in keys], [v[shared] for v in values]))
    x = x + linear(w, f"{name}.o_proj", torch.cat(attended))
    return x + mlp(w, "layers.0.mlp", rms_norm(x, w["layers.0.post_attention_layernorm.weight"]))


def compress(w: Weights, picture: list[Tensor]) -> list[Tensor]:
    """The vectors of one picture, one for each query."""
    keys = [heads(linear(w, "imadpt.k_proj", x), HEAD_DIM) for x in picture]
    values = [heads(linear(w, "imadpt.v_proj", x), HEAD_DIM) for x in picture]
    out = []
    for query in w["imadpt.q"]:
        attended = [
            attend(part, [k[h] for k in keys], [v[h] for v in values])
            for h, part in enumerate(query)
        ]
        out.append(linear(w, "imadpt.o_proj", torch.cat(attended)))
    return out


def fuse(w: Weights, embedding: Tensor, hidden: Tensor, seen: Tensor | None) -> Tensor:
    """A word's input; ``seen`` is None in stage 1."""
    if seen is not None:
        hidden = linear(w, "img_fc", torch.cat([hidden, seen]))
    return linear(w, "fc", torch.cat([embedding, hidden]))


def row_sequence(
    w: Weights, batch: Batch, row: int, hidden: list[Tensor], stage: int
) -> tuple[Sequence, list[Tensor]]:
    """The row's sequence, and what has been seen of pictures before each of its slots."""
    out = Sequence()
    length = int(batch["length"][row])
    embeds = [e.double() for e in batch["inputs_embeds"][row, :length]]
    is_picture = [bool(v) for v in batch["image_mask"][row, :length]]
    seen = torch.zeros_like(embeds[0])
    before, run = [], []
    for t in range(length):
        before.append(seen)
        last = t + 1 == length
        embedding = torch.zeros_like(embeds[0]) if last else embeds[t + 1]
        allowed = bool(batch["attention_mask"][row, t])
        if stage == 1 or last or not is_picture[t + 1]:
            out.add(fuse(w, embedding, hidden[t], seen if stage == 2 else None), t, allowed)
            continue
        run.append((embedding, t, allowed))
        if t + 2 < length and is_picture[t + 2]:
            continue
        *kept, seen = compress(w, [e for e, _, _ in run])
        # The last vectors and the last slots, as many as there are of both.
        pairs = list(zip(reversed(kept), reversed(run), strict=False))
        for vector, (_, position, allowed) in reversed(pairs):
            out.add(vector, position, allowed)
        run = []
    return out, before


def predicted(w: Weights, batch: Batch, row: int, hidden: list[Tensor], stage: int) -> list[Tensor]:
    """Predicted hidden states at all positions of the row; 0 where a picture was left out."""
    sequence, _ = row_sequence(w, batch, row, hidden, stage)
    out = [torch.zeros_like(hidden[0]) for _ in hidden]
    for here, position in enumerate(sequence.positions):
        out[position] = layer_output(w, sequence, here)
    return out


def list_mle(scores: Tensor, q: Tensor, count: int = 10) -> Tensor:
    order = sorted(range(len(q)), key=lambda v: -float(q[v]))[:count]
    loss = torch.zeros((), dtype=torch.float64)
    for i, v in enumerate(order):
        loss = loss + torch.logsumexp(torch.stack([scores[u] for u in order[i:]]), 0) - scores[v]
    return loss


def loss_means(
    w: Weights, head: Head, batch: Batch, inputs: Tensor, stage: int, mtp_steps: int = 1
) -> tuple[dict[str, Tensor], int]:
    """All terms of a stage's loss, averaged over supervised slots and passes, and over how many.

    ``inputs`` are the input hidden states, ``[B, L, H]``.
    """
    zero = torch.zeros((), dtype=torch.float64)
    names = ("smooth_l1", "soft_ce", "list_mle") if stage == 1 else ("l1", "list_mle")
    sums, count = dict.fromkeys(names, zero), 0
    for row, length in enumerate(batch["length"].tolist()):
        hidden = [h.double() for h in inputs[row, :length]]
        fed = hidden
        for _ in range(1 if stage == 1 else 1 + mtp_steps):
            out = predicted(w, batch, row, fed, stage)
            fed = [hidden[0], *out[:-1]]
            for t in range(length - 1):
                if not batch["loss_mask"][row, t + 1]:
                    continue
                count += 1
                scores = head[0] @ out[t] + head[1]
                p, q = softmax(scores), softmax(batch["logits"][row, t + 1].double())
                truth = batch["last_hidden_state"][row, t + 1].double()
                terms = {
                    "smooth_l1": sum(0.5 * d * d if d < 1 else d - 0.5 for d in abs(out[t] - truth))
                    / len(truth),
                    "soft_ce": -sum(q[v] * torch.log(p[v]) for v in range(len(q))),
                    "l1": sum(abs(p[v] - q[v]) for v in range(len(q))),
                    "list_mle": list_mle(scores, q),
                }
                sums = {name: total + terms[name] for name, total in sums.items()}
    return {name: total / max(count, 1) for name, total in sums.items()}, count


def rollout(
    w: Weights, head: Head, batch: Batch, row: int, anchor: int, depth: int, stage: int
) -> list[Tensor]:
    """Logits of each step of a literal rollout: the sequence grows and the layer runs again."""
    hidden = [h.double() for h in batch["last_hidden_state"][row, : int(batch["length"][row])]]
    whole, before = row_sequence(w, batch, row, hidden, stage)
    sequence = Sequence()
    for entry in zip(whole.inputs, whole.positions, whole.allowed, strict=True):
        if entry[1] < anchor - 1:
            sequence.add(*entry)
    feature = hidden[anchor - 1] if anchor else torch.zeros_like(hidden[0])
    out = []
    for t in range(anchor, min(anchor + depth, len(hidden))):
        seen = (before[t - 1] if t else torch.zeros_like(feature)) if stage == 2 else None
        embedding = batch["inputs_embeds"][row, t].double()
        sequence.add(fuse(w, embedding, feature, seen), t - 1, True)
        feature = layer_output(w, sequence, len(sequence.inputs) - 1)
        out.append(head[0] @ feature + head[1])
    return out
