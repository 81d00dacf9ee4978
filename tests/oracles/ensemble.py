"""Attention-based ensemble (Kim et al., ECCV 2018), one position, one head, one pair at a time."""

import math

import numpy as np

from tests.oracles.vectors import squared_distance, unit


def head_maps(
    x: np.ndarray, mask_weight: np.ndarray, mask_bias: np.ndarray, body: np.ndarray
) -> np.ndarray:
    """Maps (N, M, D, P) that leave the body: body (D, C) of the stem's x (N, C, P), masked for each head.

    Head m's mask is the sigmoid of mask_weight[m] (C, C) times x plus mask_bias[m] (C,).
    """
    N, C, P = x.shape
    M, D = len(mask_weight), len(body)
    maps = np.zeros((N, M, D, P))
    for n, m, p in np.ndindex(N, M, P):
        masked = np.zeros(C)
        for c in range(C):
            logit = mask_bias[m][c] + math.fsum(mask_weight[m][c] * x[n, :, p])
            masked[c] = x[n, c, p] / (1 + math.exp(-logit))
        maps[n, m, :, p] = [math.fsum(row * masked) for row in body]
    return maps


def head_embeddings(maps: np.ndarray, fc: np.ndarray) -> np.ndarray:
    """Mean over positions, then fc (E, D), then length one: (N, M, D, P) -> (N, M, E)."""
    N, M, _, P = maps.shape
    heads = np.zeros((N, M, len(fc)))
    for n, m in np.ndindex(N, M):
        pooled = sum(maps[n, m, :, p] for p in range(P)) / P
        heads[n, m] = unit(np.array([math.fsum(row * pooled) for row in fc]))
    return heads


def reduced_maps(maps: np.ndarray, reduction: np.ndarray) -> np.ndarray:
    """A 1x1 convolution (F, M D) of the heads' maps, one after the other: (N, M, D, P) -> (N, F, P)."""
    N, _, _, P = maps.shape
    reduced = np.zeros((N, len(reduction), P))
    for n, p in np.ndindex(N, P):
        column = np.concatenate([maps[n, m, :, p] for m in range(maps.shape[1])])
        reduced[n, :, p] = [math.fsum(row * column) for row in reduction]
    return reduced


def divergences(heads: np.ndarray, m_div: float = 1.0, same: bool = False) -> list[float]:
    """max(0, m_div - |B_p(x_i) - B_q(x_j)|^2) for p < q and all i, j, or i = j: heads (N, M, E)."""
    N, M, _ = heads.shape
    values = []
    for p in range(M):
        for q in range(p + 1, M):
            for i, j in np.ndindex(N, N):
                if i == j or not same:
                    squared = squared_distance(unit(heads[i, p]), unit(heads[j, q]))
                    values.append(max(0.0, m_div - squared))
    return values
