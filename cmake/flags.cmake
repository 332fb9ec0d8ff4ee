# How every source of the project is compiled, as the target tandem_build.

add_library(tandem_build INTERFACE)
target_include_directories(tandem_build INTERFACE ${PROJECT_BINARY_DIR}/include ${PROJECT_SOURCE_DIR})
target_compile_definitions(tandem_build INTERFACE $<$<COMPILE_LANGUAGE:C>:_GNU_SOURCE=>)
set(c_options
    -std=c17 -Wall -Wextra -Werror
    # Kernels may use fused multiply-add, which -std=c17 alone would switch off in gcc; nothing reads errno or the
    # floating-point flags after a mathematical function.
    -ffp-contract=fast -fno-math-errno -fno-trapping-math
    # __FILE__ is a path in the checkout, so that messages and printed programs are the same on every machine.
    -fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=)
set(cuda_options
    -std=c++17 -Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers,-Wno-unused-function)
set(CMAKE_C_FLAGS_DEBUG "-O1 -g")

set(tandem_x86_64 OFF)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    set(tandem_x86_64 ON)
    list(APPEND c_options -march=x86-64-v3)
endif()

# Files named *_avx512.c hold kernels that are chosen at run time where the processor has them.
function(tandem_wide_kernels)
    foreach(source IN LISTS ARGN)
        if(source MATCHES "_avx512\\.c$" AND tandem_x86_64)
            set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS
                -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma)
        endif()
    endforeach()
endfunction()

if(TANDEM_SANITIZE)
    if(NOT TANDEM_SANITIZE MATCHES "^(address,undefined|address|undefined|thread)$")
        message(FATAL_ERROR "TANDEM_SANITIZE is '${TANDEM_SANITIZE}': it may be address,undefined or address or undefined or thread.")
    endif()
    # A sanitizer changes what the optimizer sees, and gcc then warns of what cannot happen; plain builds are the judge.
    list(APPEND c_options
        -fsanitize=${TANDEM_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -Wno-error=maybe-uninitialized)
    if(CMAKE_C_COMPILER_ID MATCHES "Clang")
        list(APPEND c_options -Wno-unknown-warning-option)
    endif()
    add_link_options(-fsanitize=${TANDEM_SANITIZE})
endif()
target_compile_options(tandem_build INTERFACE "$<$<COMPILE_LANGUAGE:C>:${c_options}>" "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_options}>")
