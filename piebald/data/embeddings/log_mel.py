"""Statistics of the log-mel spectrogram of recordings: a frozen extractor without weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from piebald.core.errors import SettingError
from piebald.core.model_settings import checked_network, whole


@checked_network
class LogMel(nn.Module):
    """Mean and standard deviation over time of each band of the log-mel spectrogram: 2 * bands numbers per recording.

    Bands are triangles on the mel scale, 2595 log10(1 + f / 700), from 0 Hz to half the rate (Davis, Mermelstein 1980).

    Args:
        rate: samples per second.
        bands: number of bands on the mel scale.
        window: samples of the Hann window; successive windows overlap by half.
    """

    def __init__(self, rate: int = 16_000, bands: int = 40, window: int = 512) -> None:
        super().__init__()
        self.rate, self.window = whole("rate", rate), whole("window", window, least=16)
        whole("bands", bands)
        if bands > window // 4:
            raise SettingError(f"bands must be at most a quarter of window = {window}, got {bands}")
        self.register_buffer("bank", triangles(rate, bands, window), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Recordings [n, 1, samples] float32, at least one window long, to embeddings [n, 2 * bands]."""
        if x.dim() != 3 or x.shape[1] != 1 or x.shape[2] < self.window:
            raise SettingError(
                f"log_mel reads recordings [1, samples] of {self.window} samples or more, got rows {list(x.shape[1:])}"
            )
        hann = torch.hann_window(self.window, device=x.device)
        hop = self.window // 2
        waves = torch.stft(x[:, 0], self.window, hop, window=hann, center=False, return_complex=True)
        assert isinstance(self.bank, Tensor)
        levels = (self.bank @ waves.abs().square() + 1e-6).log()
        return torch.cat([levels.mean(2), levels.std(2, correction=0)], 1)


def triangles(rate: int, bands: int, window: int) -> Tensor:
    """Weights of frequencies in each band [bands, window // 2 + 1]."""
    top = 2595 * torch.log10(torch.tensor(1 + rate / 2 / 700))
    edges = 700 * (10 ** (torch.linspace(0, float(top), bands + 2) / 2595) - 1)
    hertz = torch.linspace(0, rate / 2, window // 2 + 1)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return torch.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)).clamp(min=0)
