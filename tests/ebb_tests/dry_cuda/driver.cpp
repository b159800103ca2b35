// Stands in for libcuda.so.1: a primary context exists, and no other function is supported.
#define DRY_API extern "C" __attribute__((visibility("default")))

DRY_API int cuInit(unsigned) { return 0; }

DRY_API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}

DRY_API int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = reinterpret_cast<void*>(1);
  return 0;
}

DRY_API int cuCtxGetCurrent(void** context) {
  *context = reinterpret_cast<void*>(1);
  return 0;
}

DRY_API int cuCtxSetCurrent(void*) { return 0; }

DRY_API int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}

DRY_API int cuDeviceGetAttribute(int* value, int, int) {
  *value = 1;
  return 0;
}

DRY_API int cuGetErrorString(int, const char** text) {
  *text = "error of the dry CUDA runtime";
  return 0;
}

#define DRY_NOT_SUPPORTED(name) \
  DRY_API int name(...) { return 801; }
DRY_NOT_SUPPORTED(cuFuncGetAttribute)
DRY_NOT_SUPPORTED(cuFuncSetAttribute)
DRY_NOT_SUPPORTED(cuFuncSetCacheConfig)
DRY_NOT_SUPPORTED(cuLaunchCooperativeKernel)
DRY_NOT_SUPPORTED(cuLaunchKernel)
DRY_NOT_SUPPORTED(cuLinkAddData_v2)
DRY_NOT_SUPPORTED(cuLinkComplete)
DRY_NOT_SUPPORTED(cuLinkCreate_v2)
DRY_NOT_SUPPORTED(cuModuleGetFunction)
DRY_NOT_SUPPORTED(cuModuleLoad)
DRY_NOT_SUPPORTED(cuModuleLoadData)
DRY_NOT_SUPPORTED(cuModuleLoadDataEx)
DRY_NOT_SUPPORTED(cuModuleUnload)
DRY_NOT_SUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
DRY_NOT_SUPPORTED(cuPointerGetAttribute)
DRY_NOT_SUPPORTED(cuTensorMapEncodeTiled)
