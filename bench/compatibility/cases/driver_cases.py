"""The driver's interface by itself: short kernels, launched one by one or as CUDA graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy

from nvshare.bench.compatibility.cases import Outcome, Program
from nvshare.bench.workloads.busy import Driver

KERNELS, WORDS, BLOCK, ROUNDS = 20, 1 << 14, 256, 400
NON_BLOCKING, CAPTURE_THREAD_LOCAL = 1, 1
MIX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry mix(.param .u64 words)
{
    .reg .u64 %a<4>;
    .reg .u32 %r<8>;
    ld.param.u64 %a1, [words];
    cvta.to.global.u64 %a1, %a1;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    mul.wide.u32 %a2, %r4, 4;
    add.u64 %a1, %a1, %a2;
    ld.global.u32 %r5, [%a1];
    mad.lo.u32 %r5, %r5, 1664525, 1013904223;
    add.u32 %r5, %r5, %r4;
    st.global.u32 [%a1], %r5;
    ret;
}
\0"""
"""words[i] = words[i] * 1664525 + 1013904223 + i: any kernel that is lost, repeated or runs on other data shows."""


class Mixer:
    """Memory that kernels change on a stream of their own."""

    def __init__(self) -> None:
        self.cuda = cuda = Driver()
        cuda.use()
        module, self._kernel, self.stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        cuda("cuModuleLoadData", ctypes.byref(module), MIX)
        cuda("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"mix")
        cuda("cuStreamCreate", ctypes.byref(self.stream), NON_BLOCKING)
        self._words = cuda.memory(4 * WORDS)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._words))

    def launch(self, count: int) -> None:
        """Launches this number of kernels."""
        sizes = (WORDS // BLOCK, 1, 1, BLOCK, 1, 1)
        for _ in range(count):
            self.cuda("cuLaunchKernel", self._kernel, *sizes, 0, self.stream, self._parameters, None)

    def graph(self, count: int) -> ctypes.c_void_p:
        """A graph of this number of kernels, ready for launch."""
        graph, instance = ctypes.c_void_p(), ctypes.c_void_p()
        self.cuda("cuStreamBeginCapture_v2", self.stream, CAPTURE_THREAD_LOCAL)
        self.launch(count)
        self.cuda("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self.cuda("cuGraphInstantiateWithFlags", ctypes.byref(instance), graph, ctypes.c_ulonglong(0))
        return instance

    def program(self, step: Callable[[], object]) -> Program:
        """Many steps on words of known contents."""

        def synchronize() -> None:
            self.cuda("cuStreamSynchronize", self.stream)

        def check() -> Outcome:
            outcome, words = Outcome(), numpy.arange(WORDS, dtype=numpy.uint32) * numpy.uint32(2654435761)
            self.cuda("cuMemcpyHtoD_v2", self._words, ctypes.c_void_p(words.ctypes.data), ctypes.c_size_t(words.nbytes))
            for _ in range(ROUNDS):
                step()
            synchronize()
            self.cuda("cuMemcpyDtoH_v2", ctypes.c_void_p(words.ctypes.data), self._words, ctypes.c_size_t(words.nbytes))
            outcome.bytes_of(words)
            return outcome

        return Program(check, step, synchronize)


def launches() -> Program:
    """20 kernels a step."""
    mixer = Mixer()
    return mixer.program(lambda: mixer.launch(KERNELS))


def replays(count: int) -> Program:
    """A graph of so many kernels a step."""
    mixer = Mixer()
    graph = mixer.graph(count)
    return mixer.program(lambda: mixer.cuda("cuGraphLaunch", graph, mixer.stream))


CASES = {"launches": launches, "graph": lambda: replays(KERNELS), "graph1": lambda: replays(1)}
