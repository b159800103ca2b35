// EBB_API marks the symbols of libebb that users may link against.
#pragma once

#define EBB_API __attribute__((visibility("default")))
