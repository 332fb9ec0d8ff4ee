# Public headers are one per folder, and core's second. In the build tree include/tandem/NAME.h forwards to the
# source; what is installed are copies. tandem.h includes them all.

set(tandem_headers)
file(GLOB headers CONFIGURE_DEPENDS core/core.h core/rewrite.h nn/nn.h optim/optim.h data/data.h parallel/parallel.h run/run.h)
set(all "/* Tandem, whole: every public header. */\n#ifndef TANDEM_TANDEM_H\n#define TANDEM_TANDEM_H\n\n")
foreach(path core/core.h core/rewrite.h nn/nn.h optim/optim.h data/data.h parallel/parallel.h run/run.h)
    if(NOT EXISTS ${PROJECT_SOURCE_DIR}/${path})
        message(STATUS "${path} is not there")
        continue()
    endif()
    cmake_path(GET path FILENAME name)
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/include/tandem/${name}
        CONTENT "#include \"${PROJECT_SOURCE_DIR}/${path}\"\n" @ONLY)
    string(APPEND all "#include <tandem/${name}>\n")
    list(APPEND tandem_headers ${PROJECT_SOURCE_DIR}/${path})
endforeach()
string(APPEND all "\n#endif\n")
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/include/tandem/tandem.h CONTENT "${all}" @ONLY)
list(APPEND tandem_headers ${PROJECT_BINARY_DIR}/include/tandem/tandem.h)
