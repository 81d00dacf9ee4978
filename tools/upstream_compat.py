"""What the losses here need of torch and its oldest versions lack."""

import collections
import contextlib
import importlib

import torch

try:
    from torch import fx
except ImportError:  # before 1.8

    class _WithoutFx:
        class Tracer:
            def __init__(self):
                raise RuntimeError("torch.fx is needed here: torch 1.8 or newer")

    fx = _WithoutFx


def autocast(device_type, enabled):
    """`torch.autocast`, from 1.10 on; before, only CUDA had it."""
    if hasattr(torch, "autocast"):
        return torch.autocast(device_type, enabled=enabled)
    return torch.cuda.amp.autocast(enabled=enabled)


@contextlib.contextmanager
def default_device(device):
    """`with torch.device(...)`, from 2.0 on; before, new tensors are on the CPU."""
    if hasattr(torch.device, "__enter__"):
        with torch.device(device):
            yield
    else:
        yield


def is_compiling():
    """Whether `torch.compile` is tracing, in versions that have it."""
    compiler = getattr(torch, "compiler", None)
    return hasattr(compiler, "is_compiling") and compiler.is_compiling()


def current_graph_task_id():
    """The backward pass under way; -1 if there is none, or where torch does not tell."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    return -1 if current is None else current()


def eigh(symmetric):
    """`torch.linalg.eigh`, from 1.8 on."""
    if hasattr(getattr(torch, "linalg", None), "eigh"):
        return torch.linalg.eigh(symmetric)
    return torch.symeig(symmetric, eigenvectors=True)


def _transforms():
    """The module `torch.fft`, from 1.7 on; before, that is a function."""
    try:
        return importlib.import_module("torch.fft")
    except ImportError:
        raise RuntimeError("torch.fft is needed for sketches: torch 1.8 or newer") from None


def rfft(x):
    """`torch.fft.rfft`, from 1.7 on, with gradients from 1.8 on."""
    return _transforms().rfft(x)


def irfft(x, n):
    """`torch.fft.irfft`, from 1.7 on, with gradients from 1.8 on."""
    return _transforms().irfft(x, n=n)


def isin(elements, test_elements):
    """`torch.isin`, from 1.10 on, of vectors."""
    return (elements.unsqueeze(1) == test_elements).any(dim=1)


def maximum(x, y):
    """`torch.maximum`, from 1.7 on."""
    return torch.max(x, y)


def minimum(x, y):
    """`torch.minimum`, from 1.7 on."""
    return torch.min(x, y)


def amax(x, dim):
    """`x.amax(dim)`, from 1.7 on; before, one of several maxima gets the whole gradient."""
    return x.amax(dim=dim) if hasattr(x, "amax") else x.max(dim=dim).values


def sort(x, stable):
    """`x.sort(stable=True)`, from 1.9 on, of a vector."""
    try:
        return x.sort(stable=stable)
    except TypeError:
        rows = sorted(range(len(x)), key=x.tolist().__getitem__)
        indices = torch.tensor(rows, dtype=torch.long, device=x.device)
        return collections.namedtuple("sort", "values indices")(x[indices], indices)


def unflatten(x, dim, sizes):
    """`x.unflatten(dim, sizes)`, from 1.13 on."""
    return x.reshape(x.shape[:dim] + tuple(sizes) + x.shape[dim + 1 :])


def var(x, dim, correction):
    """`x.var(dim, correction=...)`, from 2.0 on, for corrections of 0 and 1."""
    return x.var(dim=dim, unbiased=bool(correction))


def vmap(function):
    """`torch.vmap`, from 2.0 on, of a function of tensors."""
    if hasattr(torch, "func"):
        return torch.vmap(function)
    return lambda *batches: torch.stack(list(map(function, *batches)))
