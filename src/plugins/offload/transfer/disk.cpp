#include "plugins/offload/transfer/disk.h"

#include <c10/core/thread_pool.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

namespace ebb {
namespace {

// The file grows in steps of kGrowth bytes, or by the requested size if larger.
constexpr size_t kGrowth = size_t{64} << 20;

size_t roundUp(size_t nbytes) {
  return (nbytes + DiskFile::kBlock - 1) / DiskFile::kBlock * DiskFile::kBlock;
}

// Copies the bytes. Returns false if the program has freed memory at `from`. Uses process_vm_readv,
// which gives an error for freed memory, where memcpy would crash.
bool copyIfThere(char* to, const char* from, size_t nbytes) {
  for (size_t done = 0; done < nbytes;) {
    const iovec local{to + done, nbytes - done};
    const iovec remote{const_cast<char*>(from) + done, nbytes - done};
    const ssize_t now = ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0);
    if (now < 0 && errno != EFAULT) {
      std::memcpy(to + done, from + done, nbytes - done);  // process_vm_readv is not allowed
      return true;
    }
    if (now <= 0) {
      return false;
    }
    done += static_cast<size_t>(now);
  }
  return true;
}

// A range of the disk file. A storage that owns a range has a null data pointer, and the range as
// the context of its DataPtr.
struct Room {
  std::shared_ptr<DiskFile> file;
  size_t offset;
  size_t length;
  int process;  // id of the process that allocated the range
};

void giveRoom(void* context) {
  const std::unique_ptr<Room> room(static_cast<Room*>(context));
  if (room->process == ::getpid()) {  // in a child of fork() the file's lock may be locked for ever
    room->file->give(room->offset, room->length);
  }
}

const Room& roomOf(const c10::Storage& storage) {
  return *static_cast<const Room*>(storage.data_ptr().get_context());
}

}  // namespace

DiskFile::DiskFile(std::string directory, size_t limit)
    : directory_(std::move(directory)), limit_(limit / kBlock * kBlock) {
  std::string name = directory_ + "/ebb-" + std::string(6, 'X');  // mkostemp replaces each X
  descriptor_ = ::mkostemp(name.data(), O_CLOEXEC);
  TORCH_CHECK_VALUE(
      descriptor_ >= 0, "ebb: cannot create a file for the disk tier in '", directory_,
      "': ", std::strerror(errno), ". Set ebb.config.offload.disk to a writable folder.");
  ::unlink(name.c_str());
  ::fcntl(descriptor_, F_SETFL, O_DIRECT);  // fails on tmpfs and others, which lack O_DIRECT
}

DiskFile::~DiskFile() { ::close(descriptor_); }

size_t DiskFile::take(size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t length = roundUp(nbytes);
  const auto fits = [&](const auto& range) { return range.second >= length; };
  auto found = std::find_if(free_.begin(), free_.end(), fits);
  if (found == free_.end()) {
    if (!grow(length)) {
      return kNone;
    }
    found = std::prev(free_.end());
  }
  const auto [offset, available] = *found;
  free_.erase(found);
  if (available > length) {
    free_.emplace(offset + length, available - length);
  }
  used_ += length;
  return offset;
}

void DiskFile::give(size_t offset, size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t length = roundUp(nbytes);
  used_ -= length;
  auto range = free_.emplace(offset, length).first;
  const auto next = std::next(range);
  if (next != free_.end() && offset + length == next->first) {
    range->second += next->second;
    free_.erase(next);
  }
  if (range != free_.begin()) {
    const auto before = std::prev(range);
    if (before->first + before->second == offset) {
      before->second += range->second;
      free_.erase(range);
    }
  }
}

// Grows the file until the last free range has room for `nbytes`. Returns false if the limit or the
// disk does not allow this.
bool DiskFile::grow(size_t nbytes) {
  const bool endIsFree = !free_.empty() && free_.rbegin()->first + free_.rbegin()->second == size_;
  const size_t start = endIsFree ? free_.rbegin()->first : size_;
  if (nbytes > limit_ || start > limit_ - nbytes) {
    return false;
  }
  int failed = 0;
  for (const size_t more : {std::min(std::max(nbytes, kGrowth), limit_ - start), nbytes}) {
    const size_t end = start + more;
    do {
      failed = ::posix_fallocate(
          descriptor_, static_cast<off_t>(size_), static_cast<off_t>(end - size_));
    } while (failed == EINTR);
    if (failed == 0) {
      free_[start] = more;
      size_ = end;
      return true;
    }
  }
  TORCH_WARN_ONCE(
      "ebb: the disk tier in '", directory_,
      "' cannot grow up to its limit: ", std::strerror(failed),
      ". Further values are recomputed or stay in memory. Shown once.");
  return false;
}

std::string DiskFile::error(const char* what, size_t nbytes, int number) const {
  return c10::str(
      what, " ", nbytes, " bytes in the disk tier's file in '", directory_,
      "' failed: ", number != 0 ? std::strerror(number) : "the file is shorter than it was");
}

std::string DiskFile::write(size_t offset, const char* from, size_t nbytes, char* buffer) {
  for (size_t at = 0; at < nbytes; at += kBuffer) {
    const size_t count = std::min(nbytes - at, kBuffer);
    if (!copyIfThere(buffer, from + at, count)) {
      return "its memory was freed meanwhile";
    }
    const size_t whole = roundUp(count);
    for (size_t written = 0; written < whole;) {
      const ssize_t now = ::pwrite(
          descriptor_, buffer + written, whole - written,
          static_cast<off_t>(offset + at + written));
      if (now < 0 && errno == EINVAL && (::fcntl(descriptor_, F_GETFL) & O_DIRECT) != 0) {
        ::fcntl(descriptor_, F_SETFL, 0);  // some file systems open files with O_DIRECT, but reject
                                           // writes
      } else if (now < 0 && errno != EINTR) {
        return error("writing", nbytes, errno);
      } else if (now > 0) {
        written += static_cast<size_t>(now);
      }
    }
  }
  return {};
}

std::string DiskFile::read(size_t offset, char* to, size_t nbytes, char* buffer) {
  for (size_t at = 0; at < nbytes; at += kBuffer) {
    const size_t count = std::min(nbytes - at, kBuffer);
    const size_t whole = roundUp(count);
    for (size_t read = 0; read < count;) {
      const ssize_t now =
          ::pread(descriptor_, buffer + read, whole - read, static_cast<off_t>(offset + at + read));
      if (now == 0 || (now < 0 && errno != EINTR)) {
        return error("reading", nbytes, now == 0 ? 0 : errno);
      }
      read += static_cast<size_t>(std::max<ssize_t>(now, 0));
    }
    std::memcpy(to + at, buffer, count);
  }
  return {};
}

size_t DiskFile::used() {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

std::shared_ptr<DiskEvent> DiskEvent::past() {
  auto event = std::make_shared<DiskEvent>();
  event->done({});
  return event;
}

bool DiskEvent::isDone() const { return !isOfThisProcess() || done_.load(); }

void DiskEvent::wait() const {
  if (isOfThisProcess()) {
    done_.wait(false);
  }
}

std::string DiskEvent::error() const {
  return isOfThisProcess() || done_.load()
             ? error_
             : "it was on its way to or from disk when the process forked";
}

void DiskEvent::done(std::string error) {
  error_ = std::move(error);
  done_.store(true);
  done_.notify_all();
}

Disk& Disk::get() {
  // Leaked on purpose: the threads may outlive static objects.
  static auto* instance = new Disk;
  return *instance;
}

void Disk::configure(const std::string& directory, size_t limit) {
  adoptProcess();
  std::lock_guard<std::mutex> lock(mutex_);
  if (directory == directory_ && limit == limit_) {
    return;
  }
  file_ = directory.empty() ? nullptr : std::make_shared<DiskFile>(directory, limit);
  directory_ = directory;
  limit_ = limit;
}

// Begins in a new process. Gives a child of fork() new threads and a new file: the child has no
// threads, and the parent uses the file.
void Disk::adoptProcess() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (process_ == ::getpid()) {
    return;
  }
  process_ = ::getpid();
  writes_ = nullptr;
  reads_ = nullptr;
  if (std::exchange(file_, nullptr)) {
    try {
      file_ = std::make_shared<DiskFile>(directory_, limit_);
    } catch (const c10::Error& error) {
      TORCH_WARN(error.what_without_backtrace(), " Values are recomputed or stay in memory.");
    }
  }
}

bool Disk::isOpen() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !directory_.empty();
}

c10::Storage Disk::allocate(size_t nbytes) {
  adoptProcess();
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t offset = file_ ? file_->take(nbytes) : DiskFile::kNone;
  if (offset == DiskFile::kNone) {
    return {};
  }
  auto* room = new Room{file_, offset, nbytes, process_};
  return c10::Storage(
      c10::Storage::use_byte_size_t(), nbytes,
      c10::DataPtr(nullptr, room, &giveRoom, c10::Device(c10::kCPU)));
}

TransferEventPtr Disk::write(const c10::Storage& room, const c10::Storage& from, size_t nbytes) {
  const auto* memory = static_cast<const char*>(from.data());
  const Room place = roomOf(room);
  return start(writes_, place.process, [=](char* buffer) {
    return place.file->write(place.offset, memory, nbytes, buffer);
  });
}

TransferEventPtr Disk::read(const c10::Storage& to, const c10::Storage& room, size_t nbytes) {
  auto* memory = static_cast<char*>(to.mutable_data());
  const Room place = roomOf(room);
  return start(reads_, place.process, [=](char* buffer) {
    return place.file->read(place.offset, memory, nbytes, buffer);
  });
}

namespace {

// Runs a copy with a buffer of its own. Returns the error, or an empty string.
std::string copyWith(const std::function<std::string(char*)>& copy) {
  const std::unique_ptr<char, decltype(&std::free)> buffer(
      static_cast<char*>(std::aligned_alloc(DiskFile::kBlock, DiskFile::kBuffer)), &std::free);
  try {
    return buffer ? copy(buffer.get()) : "there is no memory for its buffer";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

// `thread` is a member, which adoptProcess() may reset.
TransferEventPtr Disk::start(c10::ThreadPool*& thread, int process, Copy copy) {
  adoptProcess();
  std::lock_guard<std::mutex> lock(mutex_);
  if (process != process_) {
    copy = [](char*) {
      return "it went to disk before the process forked, and belongs to the parent";
    };
  }
  if (thread == nullptr) {
    try {
      thread = new c10::ThreadPool(1);
    } catch (const std::system_error&) {  // too many threads: this one copies
    }
  }
  auto event = std::make_shared<DiskEvent>();
  auto job = [copy = std::move(copy), event]() mutable {
    std::string error = copyWith(copy);
    copy = nullptr;  // a thread that waits for the event may want the copy's file closed
    event->done(std::move(error));
  };
  thread == nullptr ? job() : thread->run(std::move(job));
  return event;
}

size_t Disk::used() {
  std::lock_guard<std::mutex> lock(mutex_);
  return file_ ? file_->used() : 0;
}

}  // namespace ebb
