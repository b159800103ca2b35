// Stands in for CUDA where there is none: its runtime, and torch's guard for its devices. Prints
// what the runtime is asked to do, and on which device.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <vector>

namespace {

thread_local c10::DeviceIndex current = 0;
uint64_t capture = 0;  // which is going on; 0: none
int error = 0;         // that the runtime gives where it is asked about captures

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, current); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  void* getStreamNativeHandle(c10::Stream) const { return nullptr; }
  // An override since torch 2.12.
  bool isStreamCapturing(const c10::Stream&) const {
    if (error != 0) {
      throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, error, "a fake error of CUDA's");
    }
    return capture != 0;
  }
};

const Guard guard;
const int unbuffered = std::setvbuf(stdout, nullptr, _IONBF, 0);
const c10::impl::DeviceGuardImplRegistrar registrar(c10::kCUDA, &guard);

// In percent.
size_t resident(void* memory, size_t nbytes) {
  std::vector<unsigned char> pages(nbytes / 4096);
  mincore(memory, nbytes, pages.data());
  return 100 * std::count_if(pages.begin(), pages.end(), [](auto page) { return page & 1; }) /
         pages.size();
}

}  // namespace

extern "C" {

void fake_cuda_capture(uint64_t which, int asked) {
  capture = which;
  error = asked;
}

int cudaHostRegister(void* memory, size_t nbytes, unsigned) {
  std::printf("register %zu on %d, %zu%% there\n", nbytes, int{current}, resident(memory, nbytes));
  return 0;
}
int cudaHostUnregister(void*) { return std::puts("unregister") < 0; }
int cudaGetLastError() { return std::puts("forget the error") < 0; }
int cudaDeviceGetPCIBusId(char* id, int, int) {
  *id = 0;
  return 0;
}
int cudaStreamIsCapturing(void*, int* status) {
  *status = capture != 0;
  return error;
}
int cudaStreamGetCaptureInfo(void*, int* status, uint64_t* id) {
  *status = capture != 0;
  *id = capture;
  return error;
}
}
