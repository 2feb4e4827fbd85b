"""EAGLE-3 by loops over steps, slots, heads and keys, in float64."""

import math

import torch
from oracle_parts import Weights, attend, heads, linear, mlp, rms_norm, softmax
from torch import Tensor

Batch = dict[str, Tensor]


class Oracle:
    """One draft.

    Args:
        w: its parameters.
        config: its config.
        used: the target's id of each draft id.
        placeholder: the embedding of a picture's placeholder.
    """

    def __init__(self, w: Weights, config: object, used: list[int], placeholder: Tensor) -> None:
        self.w, self.c, self.used, self.placeholder = w, config, used, placeholder

    def embedding(self, batch: Batch, row: int, t: int) -> Tensor:
        if self.c.image_embeds == "token" and batch["image_mask"][row, t]:
            return self.placeholder.double()
        return batch["inputs_embeds"][row, t].double()

    def feature(self, batch: Batch, row: int, t: int) -> Tensor:
        layers = [batch[f"hidden_states.{k}"][row, t].double() for k in self.c.target_layer_ids]
        if self.c.fc_norm:
            layers = [rms_norm(x, self.w[f"fc_norm.{j}.weight"]) for j, x in enumerate(layers)]
        joined = torch.cat(layers)
        if self.c.norm_before_fc:
            joined = rms_norm(joined, self.w["input_norm.weight"])
        return linear(self.w, "fc", joined)

    def slot(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms_norm(hidden, self.w["midlayer.hidden_norm.weight"])
        first = rms_norm(embedding, self.w["midlayer.input_layernorm.weight"])
        return torch.cat([first, normed]), normed if self.c.norm_before_residual else hidden

    def position(self, batch: Batch, row: int, t: int) -> list[int]:
        """Of slot t, on three axes; the slot before the first stands one before it."""
        if "mrope_section" not in self.c.rope_parameters:
            return [t, t, t]
        at = batch["position_ids"][row, :, max(t, 0)].tolist()
        return [p - 1 for p in at] if t < 0 else at

    def rope(self, x: Tensor, position: list[int]) -> Tensor:
        """Angles, cosines and sines are rounded to float32, as in transformers."""
        rope, half = self.c.rope_parameters, len(x) // 2
        section = rope.get("mrope_section", [half, 0, 0])
        out = list(x)
        for j in range(half):
            if rope.get("mrope_interleaved"):
                axis = j % 3 if j < 3 * section[j % 3] else 0
            else:
                axis = 0 if j < section[0] else 1 if j < section[0] + section[1] else 2
            angle = torch.tensor(float(position[axis])) * torch.tensor(
                rope["rope_theta"] ** (-2 * j / len(x))
            )
            cos, sin = float(torch.cos(angle)), float(torch.sin(angle))
            out[j] = x[j] * cos - x[j + half] * sin
            out[j + half] = x[j + half] * cos + x[j] * sin
        return torch.stack(out)

    def key_value(self, slot: Tensor, position: list[int]) -> tuple[list[Tensor], list[Tensor]]:
        size = self.c.head_dim
        key = heads(linear(self.w, "midlayer.self_attn.k_proj", slot), size)
        value = heads(linear(self.w, "midlayer.self_attn.v_proj", slot), size)
        return [self.rope(k, position) for k in key], value

    def steps(self, batch: Batch, row: int, t: int) -> list[Tensor]:
        """RMS(d_i) of slot t, as far as the row has tokens to feed. Slot -1 has no features."""
        length = len(batch["input_ids"][row])
        seen = []
        for s in range(t):
            if batch["attention_mask"][row, s]:
                embedding = self.embedding(batch, row, s + 1)
                slot, _ = self.slot(embedding, self.feature(batch, row, s))
                seen.append(self.key_value(slot, self.position(batch, row, s)))
        if t < 0:
            hidden = torch.zeros(self.c.hidden_size, dtype=torch.float64)
        else:
            hidden = self.feature(batch, row, t)
        out = []
        for i in range(self.c.ttt_steps):
            if t + 1 + i >= length:
                break
            position = [p + i for p in self.position(batch, row, t)]
            slot, residual = self.slot(self.embedding(batch, row, t + 1 + i), hidden)
            seen.append(self.key_value(slot, position))
            attended = []
            queries = heads(linear(self.w, "midlayer.self_attn.q_proj", slot), self.c.head_dim)
            for h, query in enumerate(queries):
                shared = h // (len(queries) // self.c.num_key_value_heads)
                keys = [key[shared] for key, _ in seen]
                values = [value[shared] for _, value in seen]
                attended.append(attend(self.rope(query, position), keys, values))
            residual = residual + linear(self.w, "midlayer.self_attn.o_proj", torch.cat(attended))
            post = rms_norm(residual, self.w["midlayer.post_attention_layernorm.weight"])
            hidden = residual + mlp(self.w, "midlayer.mlp", post)
            normed = rms_norm(hidden, self.w["norm.weight"])
            out.append(normed)
            hidden = normed if self.c.norm_output else hidden
        return out

    def losses(self, batch: Batch) -> list[tuple[Tensor, int]]:
        """Of each step: the sum over its slots, and how many there are.

        Mask and teacher are moved left by one before the first step and after each, as the
        published trainers do.
        """
        sums = [torch.zeros((), dtype=torch.float64) for _ in range(self.c.ttt_steps)]
        counts = [0] * self.c.ttt_steps
        for row, length in enumerate(batch["length"].tolist()):
            mask = [bool(m) for m in batch["loss_mask"][row, :length]]
            if self.c.loss_mask == "unshifted":
                mask[-1] = False
            else:
                mask = [*mask[1:], False]
            teacher = [*batch["logits"][row, 1:length].double(), None]
            outputs: dict[int, list[Tensor]] = {}
            for i in range(self.c.ttt_steps):
                for t in range(length):
                    if not mask[t] or int(teacher[t].argmax()) not in self.used:
                        continue
                    if not all(batch["attention_mask"][row, t : t + i + 2]):
                        continue
                    if t not in outputs:
                        outputs[t] = self.steps(batch, row, t)
                    p = softmax(linear(self.w, "lm_head", outputs[t][i]))
                    q = softmax(torch.stack([teacher[t][v] for v in self.used]))
                    sums[i] = sums[i] - sum(a * torch.log(b) for a, b in zip(q, p, strict=True))
                    counts[i] += 1
                mask, teacher = [*mask[1:], False], [*teacher[1:], None]
        return list(zip(sums, counts, strict=True))

    def predictions(self, batch: Batch, row: int, anchor: int) -> list[Tensor]:
        """Distributions over the target's vocabulary of the drafts at an anchor."""
        vocab, out = self.c.vocab_size, []
        for normed in self.steps(batch, row, anchor - 1):
            known = softmax(linear(self.w, "lm_head", normed))
            full = [torch.zeros((), dtype=torch.float64)] * vocab
            for j, v in enumerate(self.used):
                full[v] = known[j]
            out.append(torch.stack(full))
        return out


def total(losses: list[tuple[Tensor, int]], decay: float) -> Tensor:
    """The loss that is minimised."""
    terms = [math.pow(decay, i) * s / n for i, (s, n) in enumerate(losses) if n]
    return sum(terms, torch.zeros((), dtype=torch.float64))
