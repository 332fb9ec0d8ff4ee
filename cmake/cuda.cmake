# CUDA: device files (device_*.c) and kernels (*.cu), where the toolkit is. The runtime is linked statically and loads the
# driver when a context asks for a GPU; cuBLASLt, cuDNN and NVRTC are loaded then too. So the same binary starts anywhere.

set(TANDEM_CUDA AUTO CACHE STRING "Build for NVIDIA's GPUs: ON, OFF, or AUTO: where the CUDA Toolkit is found and no sanitizer is asked for")
set_property(CACHE TANDEM_CUDA PROPERTY STRINGS AUTO ON OFF)
# 90a: Hopper with all it has. The last one's PTX serves what comes after.
set(TANDEM_CUDA_ARCHITECTURES "80-real;89-real;90a-real;100-real;120" CACHE STRING "Architectures that kernels are compiled for")

set(tandem_cuda OFF)
if(TANDEM_CUDA STREQUAL "ON" OR (TANDEM_CUDA STREQUAL "AUTO" AND NOT TANDEM_SANITIZE))
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
        set(tandem_cuda ON)
    elseif(TANDEM_CUDA STREQUAL "ON")
        message(FATAL_ERROR "TANDEM_CUDA is ON, but no CUDA compiler was found: install the CUDA Toolkit, or name nvcc with -DCMAKE_CUDA_COMPILER.")
    else()
        message(STATUS "No CUDA compiler was found: this build has no GPU")
    endif()
endif()

if(tandem_cuda)
    set(CMAKE_CUDA_ARCHITECTURES ${TANDEM_CUDA_ARCHITECTURES})
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    target_compile_definitions(tandem_build INTERFACE TANDEM_CUDA)
    # Who links the installed archive needs the runtime and, with it, what it needs; no CUDA Toolkit's CMake package.
    set(tandem_cuda_libraries ${CUDA_cudart_static_LIBRARY} rt dl pthread)
    target_link_libraries(tandem_dependencies INTERFACE
        $<BUILD_INTERFACE:CUDA::cudart_static> "$<INSTALL_INTERFACE:${tandem_cuda_libraries}>")
endif()

# Adds to `list` the CUDA sources of a folder, or takes its device files out.
function(tandem_cuda_sources list folder)
    if(NOT tandem_cuda)
        list(FILTER ${list} EXCLUDE REGEX "/device_[a-z0-9_]*\\.c$")
    else()
        file(GLOB kernels CONFIGURE_DEPENDS ${folder}/*.cu ${folder}/ops/*.cu)
        list(APPEND ${list} ${kernels})
        file(GLOB device CONFIGURE_DEPENDS ${folder}/device_*.c ${folder}/ops/device_*.c)
        set_property(SOURCE ${device} APPEND PROPERTY INCLUDE_DIRECTORIES ${CUDAToolkit_INCLUDE_DIRS})
    endif()
    set(${list} "${${list}}" PARENT_SCOPE)
endfunction()
