// What the user sets of paging.
#pragma once

#include "ebb/paging.h"

namespace ebb {

// Throws c10::ValueError for what makes no sense.
void checkSettings(const PagingSettings& settings);

}  // namespace ebb
