#include "paging/page_stash.h"

#include "paging/paging.h"

namespace ebb {

PageStash::PageStash(const PageSource& source, PageGroupPtr of, uint64_t number)
    : nbytes(source.storage.nbytes()),
      device(source.storage.device()),
      dtype(source.dtype),
      whole{source.totalRows, static_cast<int64_t>(source.storage.nbytes()) / source.totalRows},
      showDeadRows(source.showDeadRows),
      group(std::move(of)),
      step(number) {
}

PageStash::~PageStash() {
  Paging::get().forget(*this);
}

c10::Storage PageStash::fetch(const c10::Storage& living) {
  return Paging::get().fetch(*this, living);
}

void PageStash::beforeWrite() {
  Paging::get().beforeWrite(*this);
}

}  // namespace ebb
