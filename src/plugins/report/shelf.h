// The journals of the last steps.
#pragma once

#include <cstdint>

#include "plugins/report/journal.h"

namespace ebb {

// The journal of the current step; null while reports are not recorded.
JournalPtr currentJournal();

// From now on, ebb records into `profile` in place of the step's journal; null: into the step's
// journal again.
void putJournalInPlace(JournalPtr profile);

// Called when a step begins, see Note [What a step is].
void journalStepBegins(uint64_t step);

}  // namespace ebb
