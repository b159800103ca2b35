# What find_package(ebb) reads. Defines the target ebb::ebb, and ebb_VERSION.
#
# torch is, in this order: the targets of find_package(Torch), if the project called that before;
# the folder EBB_TORCH_DIR, which holds include/ and lib/; the folder that ebb was built with.

set(_ebb_here "${CMAKE_CURRENT_LIST_DIR}")
get_filename_component(_ebb_library "${_ebb_here}/../libebb.so" ABSOLUTE)
get_filename_component(_ebb_include "${_ebb_here}/../include" ABSOLUTE)

if(NOT TARGET torch)
  set(EBB_TORCH_DIR "/work/venv/lib/python3.11/site-packages/torch" CACHE PATH "The folder that holds torch's include/ and lib/")
  if(NOT EXISTS "${EBB_TORCH_DIR}/include/torch/csrc/api/include/torch/torch.h")
    set(ebb_FOUND FALSE)
    set(ebb_NOT_FOUND_MESSAGE
      "EBB_TORCH_DIR='${EBB_TORCH_DIR}' is no torch. Call find_package(Torch) first, or pass \
-DEBB_TORCH_DIR=<the folder of torch 2.13.0 that holds include/ and lib/>.")
    return()
  endif()
endif()

# A C++ library fits the minor release that it was compiled with.
set(_ebb_torch_include "${EBB_TORCH_DIR}/include")
if(TARGET torch AND TORCH_INCLUDE_DIRS)
  list(GET TORCH_INCLUDE_DIRS 0 _ebb_torch_include)
endif()
if(EXISTS "${_ebb_torch_include}/torch/headeronly/version.h")
  file(STRINGS "${_ebb_torch_include}/torch/headeronly/version.h" _ebb_lines
    REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
  string(REGEX REPLACE "[^0-9;]+" "" _ebb_numbers "${_ebb_lines}")
  string(REPLACE ";" "." _ebb_torch_found "${_ebb_numbers}")
  if(NOT "2.13.0" MATCHES "^${_ebb_torch_found}\\.")
    set(ebb_FOUND FALSE)
    set(ebb_NOT_FOUND_MESSAGE
      "ebb was built with torch 2.13.0, and this project uses ${_ebb_torch_found}. \
Build ebb with that torch.")
    return()
  endif()
endif()

if(NOT TARGET ebb::ebb)
  add_library(ebb::ebb SHARED IMPORTED)
  set_target_properties(ebb::ebb PROPERTIES IMPORTED_LOCATION "${_ebb_library}")
  target_include_directories(ebb::ebb INTERFACE "${_ebb_include}")
  target_compile_features(ebb::ebb INTERFACE cxx_std_20)
  if(TARGET torch)
    target_link_libraries(ebb::ebb INTERFACE ${TORCH_LIBRARIES})
  else()
    target_include_directories(ebb::ebb SYSTEM INTERFACE
      "${EBB_TORCH_DIR}/include" "${EBB_TORCH_DIR}/include/torch/csrc/api/include")
    target_link_directories(ebb::ebb INTERFACE "${EBB_TORCH_DIR}/lib")
    # The program finds torch's libraries without LD_LIBRARY_PATH.
    target_link_options(ebb::ebb INTERFACE "-Wl,-rpath,${EBB_TORCH_DIR}/lib")
    target_link_libraries(ebb::ebb INTERFACE torch torch_cpu c10)
  endif()
endif()
