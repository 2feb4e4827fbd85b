"""DSpark's Markov heads: a low-rank bias on each slot's logits from the token before it.

``prev`` is the token before the slot's own, ``n`` the block's hidden state at the slot, ``e =
W1[prev]``; every head ends in ``b = W2 latent``:

* vanilla: ``latent = e``
* gated: ``latent = sigmoid(G [n; e]) * e``
* rnn: ``g, c, o = J [s; e; n]``, ``s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)``,
  ``latent = tanh(o)``, ``s = 0`` at the first slot
"""

import torch
from torch import Tensor, nn

HEAD_TYPES = ("vanilla", "gated", "rnn")


class MarkovHead(nn.Module):
    """The head called vanilla, and what the others share.

    Args:
        vocab_size: V.
        hidden_size: H.
        rank: r.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def embed(self, prev: Tensor) -> Tensor:
        """``W1[prev]``, ``[…, r]``."""
        embedded: Tensor = self.markov_w1(prev)
        return embedded

    def latents(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What ``bias`` turns into a bias.

        Args:
            hidden: ``[…, K, H]``, the K slots of blocks in order.
            embedded: ``[…, K, r]``, from ``embed``.

        Returns:
            ``[…, K, r]``.
        """
        return embedded

    def bias(self, latents: Tensor) -> Tensor:
        """``[…, r]`` to the bias on the logits, ``[…, V]``."""
        biased: Tensor = self.markov_w2(latents)
        return biased


class GatedMarkovHead(MarkovHead):
    """The hidden state decides how much of the previous token passes."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__(vocab_size, hidden_size, rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def latents(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1)))
        return gate * embedded


class RNNMarkovHead(MarkovHead):
    """A recurrent state carries the tokens of the block so far."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__(vocab_size, hidden_size, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def latents(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        state = torch.zeros_like(embedded[..., 0, :])
        out = []
        for k in range(embedded.shape[-2]):
            joint = torch.cat([state, embedded[..., k, :], hidden[..., k, :]], -1)
            gate, candidate, latent = self.joint_proj(joint).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            out.append(torch.tanh(latent))
        return torch.stack(out, -2)


def make_markov_head(kind: str, vocab_size: int, hidden_size: int, rank: int) -> MarkovHead:
    """The head of that kind, one of ``HEAD_TYPES``."""
    heads = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNMarkovHead}
    return heads[kind](vocab_size, hidden_size, rank)
