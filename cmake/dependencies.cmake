# What Tandem links, as the target tandem_dependencies. A missing one is a sentence that names Debian's package.

find_package(Threads REQUIRED)
find_package(OpenMP COMPONENTS C)
if(NOT OpenMP_C_FOUND)
    message(FATAL_ERROR "The compiler ${CMAKE_C_COMPILER} has no OpenMP: for gcc install Debian's package build-essential, for clang libomp-dev.")
endif()

add_library(tandem_dependencies INTERFACE)
target_link_libraries(tandem_dependencies INTERFACE
    $<BUILD_INTERFACE:OpenMP::OpenMP_C> $<BUILD_INTERFACE:Threads::Threads> m)
# A program that links the installed archive needs the OpenMP runtime too; the flag serves gcc and clang, C and C++.
target_link_options(tandem_dependencies INTERFACE $<INSTALL_INTERFACE:-fopenmp>)
target_link_libraries(tandem_dependencies INTERFACE $<INSTALL_INTERFACE:pthread>)

function(tandem_dependency what header library package)
    find_path(TANDEM_${library}_INCLUDE ${header})
    find_library(TANDEM_${library}_LIBRARY ${library})
    mark_as_advanced(TANDEM_${library}_INCLUDE TANDEM_${library}_LIBRARY)
    if(NOT TANDEM_${library}_INCLUDE OR NOT TANDEM_${library}_LIBRARY)
        message(FATAL_ERROR "Tandem needs ${what}, which was not found: install Debian's package ${package}.")
    endif()
    target_include_directories(tandem_dependencies SYSTEM INTERFACE $<BUILD_INTERFACE:${TANDEM_${library}_INCLUDE}>)
    target_link_libraries(tandem_dependencies INTERFACE
        $<BUILD_INTERFACE:${TANDEM_${library}_LIBRARY}> $<INSTALL_INTERFACE:${library}>)
endfunction()

tandem_dependency("oneDNN" oneapi/dnnl/dnnl.h dnnl libdnnl-dev)
tandem_dependency("zlib" zlib.h z zlib1g-dev)
tandem_dependency("the JSON parser yajl" yajl/yajl_parse.h yajl libyajl-dev)
tandem_dependency("PCRE2" pcre2.h pcre2-8 libpcre2-dev)
