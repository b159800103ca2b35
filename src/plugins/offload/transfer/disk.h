// The disk tier: a file for bytes that do not fit in memory, and the threads that write and read
// the file.
#pragma once

#include <c10/core/Storage.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "plugins/offload/transfer/transfer.h"

namespace c10 {
class ThreadPool;
}  // namespace c10

namespace ebb {

// Note [The disk tier]
// The disk tier is one file in the user's directory, which loses its name at once, so the file
// disappears when the process ends, however the process ends. The file grows by preallocation up to
// the limit, so a full disk is noticed before anything relies on the space. Bytes bypass the page
// cache where the file system allows (O_DIRECT), since page cache is memory too. One thread does
// all writes in order, and another thread all reads. A child of fork() has neither the threads nor
// a file of its own, and the parent continues to use the old file. So the child opens another file,
// and does not read bytes written before the fork.
class DiskFile {
 public:
  // Throws c10::ValueError if the directory does not exist or ebb cannot create a file there.
  DiskFile(std::string directory, size_t limit);
  ~DiskFile();

  static constexpr size_t kNone = SIZE_MAX;

  // Offset of a free range of `nbytes`, or kNone if the limit or the disk has no room.
  size_t take(size_t nbytes);
  void give(size_t offset, size_t nbytes);

  // Copy between the file and any memory, through `buffer` of kBuffer bytes. Return an error
  // message, empty on success.
  std::string write(size_t offset, const char* from, size_t nbytes, char* buffer);
  std::string read(size_t offset, char* to, size_t nbytes, char* buffer);

  size_t used();

  static constexpr size_t kBuffer = size_t{4} << 20;  // bytes
  static constexpr size_t kBlock = 4096;              // alignment for O_DIRECT, in bytes

 private:
  bool grow(size_t nbytes);
  std::string error(const char* what, size_t nbytes, int number) const;

  const std::string directory_;
  const size_t limit_;  // bytes
  int descriptor_ = -1;
  std::mutex mutex_;               // guards the members below
  std::map<size_t, size_t> free_;  // lengths by offset, no two adjacent
  size_t size_ = 0;                // preallocated bytes
  size_t used_ = 0;                // bytes of ranges from take()
};

// The end of one read or write.
class DiskEvent final : public TransferEvent {
 public:
  static std::shared_ptr<DiskEvent> past();  // an event that is done
  bool isDone() const override;
  void wait() const override;

  // The error of a finished read or write; empty on success.
  std::string error() const override;

  void done(std::string error);

 private:
  bool isOfThisProcess() const { return process_ == ::getpid(); }

  // A child of fork() never waits: no thread there would end the event.
  const int process_ = ::getpid();
  std::atomic<bool> done_{false};
  std::string error_;  // read only if `done_`
};

class Disk {
 public:
  static Disk& get();

  // An empty directory turns the disk tier off. `limit` is in bytes. Bytes in an earlier file stay
  // there. Throws as DiskFile does.
  void configure(const std::string& directory, size_t limit);

  bool isOpen();

  // Room for `nbytes`, as a storage without memory. Null if the disk has no room.
  c10::Storage allocate(size_t nbytes);

  // The memory must live until the event is done. Writes run in order, and so do reads.
  TransferEventPtr write(const c10::Storage& room, const c10::Storage& from, size_t nbytes);
  TransferEventPtr read(const c10::Storage& to, const c10::Storage& room, size_t nbytes);

  size_t used();  // bytes in use in the current file

 private:
  // Copies between memory and a file, through a buffer of DiskFile::kBuffer bytes. Returns an error
  // message, empty on success.
  using Copy = std::function<std::string(char* buffer)>;

  void adoptProcess();
  // `process`: allocated the room. Copies of another process's room fail.
  TransferEventPtr start(c10::ThreadPool*& thread, int process, Copy copy);

  std::mutex mutex_;  // guards the members below
  int process_ = 0;   // owner of the threads and the file; 0: none yet
  std::string directory_;
  size_t limit_ = 0;
  std::shared_ptr<DiskFile> file_;  // null without a disk tier
  // Each has one thread. Null before the first copy, and never destroyed: the thread lives as long
  // as the process.
  c10::ThreadPool* writes_ = nullptr;
  c10::ThreadPool* reads_ = nullptr;
};

}  // namespace ebb
