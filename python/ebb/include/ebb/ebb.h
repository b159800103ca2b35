// ebb for libtorch programs: in a region, activations are kept or recomputed op by op. Gradients
// are bit-identical to eager.
//
//   #include <ebb/ebb.h>
//
//   torch::Tensor loss;
//   {
//     ebb::Region region(ebb::saveMatmuls());
//     loss = net->forward(x).sum();
//   }
//   loss.backward();
#pragma once

#include "ebb/ahead.h"
#include "ebb/offload.h"
#include "ebb/paging.h"
#include "ebb/policy.h"
#include "ebb/profile.h"
#include "ebb/region.h"
#include "ebb/report.h"
#include "ebb/verify.h"
