// ebb for libtorch programs: regions in which activations are kept, or made again in backward, op
// by op, with gradients bit-identical to plain eager.
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
