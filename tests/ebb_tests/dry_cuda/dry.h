// State of the dry CUDA runtime, shared by its files.
#pragma once

// Note [Dry CUDA runtime]
// This library stands in for libcudart, cuBLAS and, with driver.cpp, for the driver. Preloaded, it
// lets a CUDA build of torch run its own caching allocator, stream pool, events, generators, graph
// captures, autograd threads and CUDA dispatch on a machine without a GPU. Memory, streams, events
// and captures behave as on a device. Kernels are counted and do nothing. values.cpp is a module
// that gives results: it runs the CPU's kernels on the same memory.
//
// Each stream has a clock, the time at which its work so far is complete. A kernel or copy moves
// the clock by its duration, so events become ready late and waits wait. The bytes of a copy move
// at once: races between streams do not show here, but on the test device of tests/accelerator.
//
// Variables (all optional):
// * DRY_CUDA_DEVICES: the number of devices, 1.
// * DRY_CUDA_MEMORY: bytes of each device, 8 GiB. Allocations beyond fail.
// * DRY_CUDA_LOG: a file that gets a line for each launch and copy.
// * DRY_CUDA_KERNEL_US, DRY_CUDA_GEMM_US, DRY_CUDA_GBPS: durations of kernels and of matrix
// products
//   in microseconds, and the speed of copies between host and device. 0: no time.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

#define DRY_API extern "C" __attribute__((visibility("default")))

namespace dry {

constexpr int kMostDevices = 64;

struct Settings {
  int devices;
  size_t memory;                          // bytes of each device
  double kernelMs, productMs, msPerByte;  // durations
  FILE* log;                              // null: no log
};
const Settings& settings();

struct Graph {
  size_t nodes = 0;
};

struct Stream {
  int device;
  int priority;
  Graph* capture = nullptr;  // null: not capturing
  unsigned long long captureId = 0;
  bool globalMode = false;  // the capture forbids unsafe calls of all threads
  double until = 0;         // all work so far is complete at this time, in ms of now()
};

struct Event {
  double at = 0;  // the time at which the event is ready
  bool isTimed = true;
  Stream* capturedOn = nullptr;  // null: recorded outside of captures
};

struct Block {
  size_t nbytes;
  int device;
  bool isHost;
};

// Guards all state.
std::mutex& lock();

std::map<char*, Block>& blocks();
std::map<Stream*, bool>& streams();
std::unordered_map<const void*, std::string>& kernelNames();
size_t& usedBytes(int device);

// The thread's current device.
int& currentDevice();

// Notes `error` as the thread's last one, and returns it.
cudaError_t failed(cudaError_t error);

// Milliseconds of the host's clock.
double now();
void sleepUntil(double at);

// Null for the default stream.
Stream* streamOf(cudaStream_t stream);
// As streamOf(); the current device's default stream instead of null.
Stream& clockOf(cudaStream_t stream);

// Appends work that takes `ms` to a stream, or a node to the stream's capture. The caller holds
// lock().
void append(cudaStream_t stream, double ms);

// Counts a launch of the kernel whose host address is `kernel`.
cudaError_t launch(const void* kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream);

}  // namespace dry
