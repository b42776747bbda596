"""One training of bench/out_of_core.py on a GPU, in one mode; prints what it came to.

out_of_core_gpu.py '{"mode": ..., "model": ..., "steps": ..., "cap_bytes": ..., "quick": ...}'

- plain, checkpointing: in core.
- offloaded: `paceline.training.OutOfCore`, by the plan, to pinned memory of the host.
- managed: all tensors in managed memory, whose pages come by page faults: the naive way.
- prefetched: managed memory, with saved tensors advised and prefetched to the host when they are
  saved, and back when they are needed.

With "cap_bytes" the process has so much of the card: by torch's limit, or for managed memory, which
has none, beside a block that takes the rest of what is free. More managed memory than was free
before that block is refused, as it would take other processes' part. Written without a GPU at hand:
it has not run yet.
"""

import ctypes
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from out_of_core_models import make
from torch import nn

from paceline.training import OutOfCore

BATCHES = 16  # of those that the CPU trains
LEAST_BYTES = 1 << 16
BUDGET_PART = 0.9  # torch's allocator cannot use all of its blocks

# Blocks are kept for the next tensors of their size, as torch's own allocator does: all work is on
# one stream.
SHIM = """
#include <dlfcn.h>
#include <sys/types.h>
#include <mutex>
#include <unordered_map>
namespace {
using Allocate = int (*)(void**, size_t, unsigned);
Allocate allocate_managed = nullptr;
std::mutex mutex;
std::unordered_multimap<size_t, void*> free_blocks;
size_t total = 0, most = 0;
}
extern "C" int open_runtime(const char* path, size_t most_bytes) {
  void* const library = dlopen(path, RTLD_NOW);
  most = most_bytes;
  if (library) allocate_managed = (Allocate)dlsym(library, "cudaMallocManaged");
  return allocate_managed ? 0 : 1;
}
extern "C" void* managed_malloc(ssize_t size, int, void*) {
  const std::lock_guard lock(mutex);
  const auto found = free_blocks.find(size);
  if (found != free_blocks.end()) {
    void* const block = found->second;
    free_blocks.erase(found);
    return block;
  }
  void* block = nullptr;
  if (total + size > most || allocate_managed(&block, size, 1)) return nullptr;
  total += size;
  return block;
}
extern "C" void managed_free(void* block, ssize_t size, int, void*) {
  const std::lock_guard lock(mutex);
  free_blocks.emplace(size, block);
}
"""


class Location(ctypes.Structure):
    """`cudaMemLocation` of CUDA 13; before, a device's number stands in its place."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class ManagedMemory:
    """Torch's allocator in managed memory, and what can be asked of its pages."""

    def __init__(self, cap_bytes):
        free, _ = torch.cuda.mem_get_info()
        path = self._runtime()
        folder = Path(tempfile.mkdtemp())
        (folder / "managed.cpp").write_text(SHIM)
        library = folder / "managed.so"
        command = ["c++", "-std=c++17", "-shared", "-fPIC", "-o", library, folder / "managed.cpp"]
        subprocess.run([*command, "-ldl"], check=True)
        if ctypes.CDLL(str(library)).open_runtime(path.encode(), ctypes.c_size_t(free)):
            sys.exit("no managed memory in the CUDA runtime")
        self._cuda = ctypes.CDLL(path)
        self._block = ctypes.c_void_p()
        size = ctypes.c_size_t(max(free - cap_bytes, 0))
        if size.value and self._cuda.cudaMalloc(ctypes.byref(self._block), size):
            sys.exit("the card has not what it said is free")
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            str(library), "managed_malloc", "managed_free"
        )
        torch.cuda.memory.change_current_allocator(allocator)

    @staticmethod
    def _runtime():
        """Return the path of the CUDA runtime that torch has loaded."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return next(line.split()[-1] for line in lines if "libcudart" in line)

    def move(self, tensor, *, to_host):
        """Have the pages of a tensor go to one side, in the order of the stream."""
        begin, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        preferred = 3  # cudaMemAdviseSetPreferredLocation
        if int(torch.version.cuda.split(".")[0]) >= 13:
            side = Location(2, 0) if to_host else Location(1, torch.cuda.current_device())
            codes = [
                self._cuda.cudaMemAdvise(begin, size, preferred, side),
                self._cuda.cudaMemPrefetchAsync(begin, size, side, ctypes.c_uint(0), stream),
            ]
        else:
            side = -1 if to_host else torch.cuda.current_device()
            codes = [
                self._cuda.cudaMemAdvise(begin, size, preferred, side),
                self._cuda.cudaMemPrefetchAsync(begin, size, side, stream),
            ]
        if any(codes):
            sys.exit(f"pages could not be moved: {codes}")

    def pack(self, tensor):
        if tensor.nbytes >= LEAST_BYTES and not isinstance(tensor, nn.Parameter):
            self.move(tensor, to_host=True)
        return tensor

    def unpack(self, tensor):
        if tensor.nbytes >= LEAST_BYTES and not isinstance(tensor, nn.Parameter):
            self.move(tensor, to_host=False)
        return tensor


def main():
    asked = json.loads(sys.argv[1])
    mode, cap_bytes = asked["mode"], asked.get("cap_bytes")
    torch.cuda.init()
    managed = ManagedMemory(cap_bytes) if mode in ("managed", "prefetched") else None
    if cap_bytes and managed is None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_bytes / total)
    model, inputs, target = make(asked["model"], mode == "checkpointing", asked["quick"])
    model = model.cuda()
    inputs, target = (
        tensor.repeat(BATCHES, *[1] * (tensor.dim() - 1)).cuda() for tensor in (inputs, target)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    out_of_core = None
    if mode == "offloaded":
        out_of_core = OutOfCore(model, optimizer, budget_bytes=int(BUDGET_PART * cap_bytes))
    if mode == "prefetched":
        torch.autograd.graph.saved_tensors_hooks(managed.pack, managed.unpack).__enter__()
    times, digests = [], []
    for step in range(asked["steps"]):
        torch.manual_seed(step)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), target).backward()
        torch.cuda.synchronize()
        gradients_s = time.perf_counter() - begin
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.grad.cpu().numpy())
        digests.append(digest.hexdigest()[:16])
        begin = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(gradients_s + time.perf_counter() - begin)
    result = {"step_s": times, "digests": digests}
    if managed is None:
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    if out_of_core is not None:
        result["out_of_core"] = out_of_core.to_json()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
