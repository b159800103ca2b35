// The journals of the last steps.
#pragma once

#include <cstdint>

#include "report/journal.h"

namespace ebb {

// The step's journal; null while reports are not recorded.
JournalPtr currentJournal();

// Records into a profile's journal in place of the step's; null: into the step's again.
void putJournalInPlace(JournalPtr profile);

// A step begins, see Note [What a step is].
void journalStepBegins(uint64_t step);

}  // namespace ebb
