// Which symbols of libebb are for its users.
#pragma once

#define EBB_API __attribute__((visibility("default")))
