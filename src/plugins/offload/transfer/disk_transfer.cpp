// Transfers between memory and disk, for training without an accelerator.
#include <malloc.h>

#include <array>
#include <memory>

#include "memory/bytes.h"
#include "plugins/offload/transfer/disk.h"
#include "plugins/offload/transfer/transfer.h"

namespace ebb {
namespace {

constexpr int64_t kCompute = 0;
constexpr int64_t kOut = 1;
constexpr int64_t kIn = 2;

// Note [Memory that is given back]
// glibc keeps freed blocks of up to 32 MiB, and cannot reuse many of them for torch's aligned
// allocations, so memory of values moved to disk would stay resident. From the first move on,
// blocks of 1 MiB or more are therefore mapped on their own and unmapped when freed.
void giveFreedMemoryBack() {
#ifdef __GLIBC__
  static const int once = ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
  static_cast<void>(once);
#endif
}

// CPU ops run when called, so a wait() of the compute stream blocks the host. A wait() of a copy
// stream costs nothing: the engine passes only events that are done.
class DiskTransfer final : public Transfer {
 public:
  bool isDisk() const override { return true; }

  bool isDevice(c10::Device device) const override {
    return device.is_cpu() && Disk::get().isOpen();
  }

  c10::Stream computeStream(c10::Device) override { return stream(kCompute); }

  c10::Stream outStream(c10::Device) override { return stream(kOut); }

  c10::Stream inStream(c10::Device) override { return stream(kIn); }

  TransferEventPtr record(c10::Stream stream) override { return last_[stream.id()]; }

  void wait(c10::Stream, const TransferEventPtr& event) override { event->wait(); }

  c10::Storage allocateOnDevice(size_t nbytes, c10::Device device) override {
    return allocate(nbytes, device);
  }

  c10::Storage allocateOnHost(size_t nbytes, c10::Device) override {
    giveFreedMemoryBack();
    c10::Storage room = Disk::get().allocate(nbytes);
    TORCH_CHECK(room, "ebb: the disk tier has no room for ", nbytes, " bytes");
    return room;
  }

  void copy(const c10::Storage& to, const c10::Storage& from, size_t nbytes, c10::Stream stream)
      override {
    last_[stream.id()] = stream.id() == kOut ? Disk::get().write(to, from, nbytes)
                                             : Disk::get().read(to, from, nbytes);
  }

 private:
  static c10::Stream stream(int64_t number) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCPU), number);
  }

  // The latest copy, by stream.
  std::array<TransferEventPtr, 3> last_{DiskEvent::past(), DiskEvent::past(), DiskEvent::past()};
};

}  // namespace

std::shared_ptr<Transfer> diskTransfer() { return std::make_shared<DiskTransfer>(); }

}  // namespace ebb
