"""Numbers drawn at random: by layers, by ops, by generators that a module holds or seeds, and by Python."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.hostile.harness import Net, case


@case(refused="SC111")
class SeedsInForward(Net):
    """Eager PyTorch draws the same numbers in every step."""

    def between(self, h: Tensor) -> Tensor:
        torch.manual_seed(3)
        return h + torch.randn_like(h)


@case(refused="SC111")
class SeedsAForkedGenerator(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return h * torch.rand_like(h)


@case()
class PutsTheStateBackToDrawTwice(Net):
    """Both are the same numbers: nothing is added."""

    def between(self, h: Tensor) -> Tensor:
        state = torch.get_rng_state()
        first = torch.randn_like(h)
        torch.set_rng_state(state)
        return h + (first - torch.randn_like(h)) * 10


@case(random=True)
class ForksTheGenerator(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return h * torch.rand_like(h)


@case()
class DrawsTheSameInAFork(Net):
    """The fork ends where it began, so that the next numbers are those of the fork."""

    def between(self, h: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            first = torch.randn_like(h)
        return h + (first - torch.randn_like(h)) * 10


@case(refused="SC111")
class AGeneratorSeededInForward(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.rand(6, generator=torch.Generator().manual_seed(3))


@case(refused="SC111")
class AGeneratorOfTheModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(3)

    def between(self, h: Tensor) -> Tensor:
        return h * torch.rand(6, generator=self.draw)


@case(refused="SC111")
class AGeneratorOfTheModuleInPlace(AGeneratorOfTheModule):
    def between(self, h: Tensor) -> Tensor:
        return h + torch.empty_like(h).normal_(generator=self.draw)


@case(refused="SC111")
class ComputesWithTheSeed(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * (1 + torch.initial_seed() % 7)


@case(refused="SC111")
class ScalesByTheSeed(Net):
    def between(self, h: Tensor) -> Tensor:
        return torch.initial_seed() * h


@case(refused="SC111")
class MakesATensorOfTheSeed(Net):
    def between(self, h: Tensor) -> Tensor:
        return h + torch.tensor(torch.initial_seed(), dtype=h.dtype)


@case(refused="SC111")
class DecidesByTheSeed(Net):
    def between(self, h: Tensor) -> Tensor:
        return h if torch.initial_seed() == 0 else 2 * h


@case()
class LogsTheSeed(Net):
    def between(self, h: Tensor) -> Tensor:
        logging.getLogger(__name__).info("seed %s, %s", torch.initial_seed(), f"{torch.random.initial_seed():x}")
        return h


@case(warned="SC109")
class DropsMoreEachStep(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def between(self, h: Tensor) -> Tensor:
        self.drop.p += 0.1
        return self.drop(h)


@case(refused="SC101")
class ABufferSaysHowMuchIsDropped(Net):
    rate: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", torch.tensor(0.3))

    def between(self, h: Tensor) -> Tensor:
        return functional.dropout(h, float(self.rate), True)


@case(random=True)
class DropsInEvaluation(Net):
    def __init__(self) -> None:
        super().__init__()
        self.eval()

    def between(self, h: Tensor) -> Tensor:
        return functional.dropout(h, 0.5, training=True)


@case(random=True)
class DropsInPlace(Net):
    def between(self, h: Tensor) -> Tensor:
        return functional.dropout(h * 2, 0.4, True, inplace=True)


@case(random=True)
class DropsChannels(Net):
    def between(self, h: Tensor) -> Tensor:
        return functional.dropout1d(h.view(-1, 3, 2), 0.4).reshape(h.shape)


@case(random=True)
class FeatureAlphaDropout(Net):
    def between(self, h: Tensor) -> Tensor:
        return functional.feature_alpha_dropout(h.view(-1, 3, 2), 0.4, training=True).reshape(h.shape)


@case(random=True)
class DropsAllOrNothing(Net):
    def between(self, h: Tensor) -> Tensor:
        return h + functional.dropout(h, 1.0) + functional.dropout(h, 0.0)


@case(random=True)
class OneDropoutTwice(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def between(self, h: Tensor) -> Tensor:
        return self.drop(h) - self.drop(h) * 2


class _Recurrent(Net):
    kind: type[nn.RNNBase] = nn.GRU

    def __init__(self) -> None:
        super().__init__()
        self.c = self.kind(6, 6, num_layers=2, dropout=0.5, batch_first=True)

    def between(self, h: Tensor) -> Tensor:
        return self.c(h.unsqueeze(1).expand(-1, 2, -1))[0].sum(1)


@case(random=True)
class DropoutOfAnLstm(_Recurrent):
    kind = nn.LSTM


@case(random=True)
class DropoutOfAGru(_Recurrent):
    pass


@case(random=True)
class DropoutOfAttention(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)

    def between(self, h: Tensor) -> Tensor:
        rows = h.unsqueeze(1).expand(-1, 3, -1)
        return self.c(rows, rows, rows, need_weights=False)[0].sum(1)


@case(random=True)
class DropsBelowACheckpoint(Net):
    """Backward has to draw what forward drew: the other's mask would give another gradient."""

    def between(self, h: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return functional.dropout(self.b(functional.dropout(x, 0.5)).tanh(), 0.5) * torch.rand_like(x)

        return checkpoint(part, checkpoint(part, h, use_reentrant=False), use_reentrant=False)


@case(random=True)
class DropsBelowAReentrantCheckpoint(Net):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(lambda x: functional.dropout(self.b(x).tanh(), 0.5), h, use_reentrant=True)


@case(random=True)
class ATensorDecidesOnALayer(Net):
    def between(self, h: Tensor) -> Tensor:
        return h if torch.rand(()) < 0.5 else self.b(h)


@case(random=True)
class LayersDroppedByWhere(Net):
    def between(self, h: Tensor) -> Tensor:
        return torch.where(torch.rand(()) < 0.5, h, self.b(h))


@case(random=True)
class PathsDroppedBySample(Net):
    def between(self, h: Tensor) -> Tensor:
        keep = h.new_empty(h.shape[0], 1).bernoulli_(0.7)
        return h + self.b(h).tanh() * keep.div_(0.7)


@case(random=True)
class BernoulliInPlaceOfProbabilities(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.empty_like(h).bernoulli_(h.detach().sigmoid())


@case(random=True)
class ExponentialNoise(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.empty_like(h).exponential_(2.0)


@case(random=True)
class SampledFromADistribution(Net):
    def between(self, h: Tensor) -> Tensor:
        drawn = Normal(h, h.abs() + 1, validate_args=False).rsample()
        return drawn + Normal(h.detach(), 1.0, validate_args=False).log_prob(drawn.detach()).mean()


@case(refused="SC104")
class NormalOfMeans(Net):
    def between(self, h: Tensor) -> Tensor:
        return h + torch.normal(h.detach(), 0.5)


@case(refused="SC104")
class LeakyAtRandom(Net):
    def between(self, h: Tensor) -> Tensor:
        return functional.rrelu(h, training=True)


@case(random=True)
class WholeNumbers(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.randint(1, 4, h.shape)


@case(random=True)
class WholeNumbersLike(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.randint_like(h, 1, 4)


@case(random=True)
class RowsMixed(Net):
    """Mixup: each row with that of another."""

    def between(self, h: Tensor) -> Tensor:
        return h * 0.7 + h[torch.randperm(h.shape[0])] * 0.3


@case(refused="SC104")
class Multinomial(Net):
    def between(self, h: Tensor) -> Tensor:
        return h + functional.one_hot(torch.multinomial(h.detach().softmax(-1), 1).squeeze(-1), 6)


@case(refused="SC104")
class Poisson(Net):
    def between(self, h: Tensor) -> Tensor:
        return h + torch.poisson(h.detach().abs())


@case(random=True)
class NoiseOfABuffer(Net):
    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(6))

    def between(self, h: Tensor) -> Tensor:
        self.noise.mul_(0.5).add_(torch.randn_like(self.noise))
        return h * self.noise


@case(random=True)
class WeightsDrawnInForward(Net):
    def between(self, h: Tensor) -> Tensor:
        projection = torch.empty(6, 6, dtype=h.dtype)
        nn.init.uniform_(projection, -1, 1)
        return h @ projection


@case(random=True)
class NoiseOnAWeight(Net):
    def between(self, h: Tensor) -> Tensor:
        return functional.linear(h, self.b.weight + 0.1 * torch.randn_like(self.b.weight))


@case(random=True)
class NoiseInBackward(Net):
    def between(self, h: Tensor) -> Tensor:
        out = h * 1
        out.register_hook(lambda g: g + 0.1 * torch.randn_like(g))
        return out


@case(warned="SC111")
class AnArrayOfNumpysNumbers(Net):
    def between(self, h: Tensor) -> Tensor:
        return h + torch.from_numpy(np.random.randn(6))


@case(warned="SC111")
class RowsPermutedByNumpy(Net):
    def between(self, h: Tensor) -> Tensor:
        return h[:, np.random.permutation(6).tolist()]


@case(warned="SC111")
class LayersInAnyOrder(Net):
    def between(self, h: Tensor) -> Tensor:
        for layer in random.sample([self.a, self.b], 2):
            h = layer(h)
        return h


@case(warned="SC111")
class AGeneratorInAClosure(Net):
    def __init__(self) -> None:
        super().__init__()
        draw = random.Random(0)
        self.scale: Any = lambda: draw.random()

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale()


@case(random=True)
class FromTorchsOwnGenerator(Net):
    def between(self, h: Tensor) -> Tensor:
        return h + torch.empty_like(h).uniform_(generator=torch.default_generator)
