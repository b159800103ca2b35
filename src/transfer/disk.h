// The disk tier: a file that holds what finds no room in memory, and the threads that fill and read
// it.
#pragma once

#include <c10/core/Storage.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "transfer/transfer.h"

namespace ebb {

// Note [The disk tier]
// One file in the directory that the user names, without a name of its own: it is gone when the
// process ends, however that happens. It grows by preallocation up to the limit, so a full disk is
// found out before anything relies on it. Bytes go past the page cache where the file system allows
// (O_DIRECT), since they are to leave memory. Two threads, one for each direction, work in order.
// A child of fork() has neither threads nor a file of its own, and its parent goes on to use the
// old one: it opens another, and does not read what was written before.
class DiskFile {
 public:
  // Throws c10::ValueError if there is no such directory or no file can be made in it.
  DiskFile(std::string directory, size_t limit);
  ~DiskFile();
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  static constexpr size_t kNone = SIZE_MAX;

  // Where `nbytes` may be put, or kNone if the limit or the disk has no room.
  size_t take(size_t nbytes);
  void give(size_t offset, size_t nbytes);

  // From or to anywhere in memory, by way of `buffer`, of kBuffer bytes. Returns what went wrong.
  std::string write(size_t offset, const char* from, size_t nbytes, char* buffer);
  std::string read(size_t offset, char* to, size_t nbytes, char* buffer);

  size_t used();

  static constexpr size_t kBuffer = size_t{4} << 20;  // bytes
  static constexpr size_t kBlock = 4096;              // what O_DIRECT aligns to, in bytes

 private:
  bool grow(size_t nbytes);
  std::string error(const char* what, size_t nbytes, int number) const;

  const std::string directory_;
  const size_t limit_;  // bytes
  int descriptor_ = -1;
  std::mutex mutex_;               // guards what follows
  std::map<size_t, size_t> free_;  // lengths by offset, no two adjacent
  size_t size_ = 0;                // preallocated so far
  size_t used_ = 0;                // taken
};

// The end of one read or write.
class DiskEvent final : public Event {
 public:
  DiskEvent();
  static std::shared_ptr<DiskEvent> past();  // that is done
  bool isDone() const;
  void wait() const;

  // What went wrong; empty if nothing did. Once it is done.
  std::string error() const override;

  void done(std::string error);

 private:
  bool isOfThisProcess() const;

  const int process_;  // in a child of fork() nobody would ever end it
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  std::string error_;
};

inline const DiskEvent& asDiskEvent(const Event& event) {
  return static_cast<const DiskEvent&>(event);
}

class Disk {
 public:
  static Disk& get();

  // The directory, or an empty string for none, and the most bytes to use. What is in an earlier
  // file stays there. Throws as DiskFile does.
  void configure(const std::string& directory, size_t limit);

  bool isOpen();

  // Room for `nbytes`, as a storage without memory. Null if there is none.
  c10::Storage allocate(size_t nbytes);

  // Whether `room` is in the file that is now in use, and this process's.
  bool isCurrent(const c10::Storage& room);

  // The memory must live until the event is done. Writes are done in their order, and so are reads.
  EventPtr write(const c10::Storage& room, const c10::Storage& from, size_t nbytes);
  EventPtr read(const c10::Storage& to, const c10::Storage& room, size_t nbytes);

  // The end of all writes, or of all reads, so far.
  EventPtr lastWrite();
  EventPtr lastRead();

  size_t used();  // bytes, of the file now in use

 private:
  struct Job;
  class Queue;

  Disk();
  void adoptProcess();
  EventPtr start(bool isWrite, const c10::Storage& room, char* memory, size_t nbytes);

  std::mutex mutex_;  // guards what follows
  int process_;       // whose threads and file these are
  std::string directory_;
  size_t limit_ = 0;
  std::shared_ptr<DiskFile> file_;  // null if there is none
  std::shared_ptr<Queue> writes_;
  std::shared_ptr<Queue> reads_;
};

}  // namespace ebb
