# cmake --install: the library, its headers, find_package(Tandem) and pkg-config's tandem.

include(CMakePackageConfigHelpers)

set(package_directory ${CMAKE_INSTALL_LIBDIR}/cmake/Tandem)
install(TARGETS tandem tandem_dependencies EXPORT Tandem)
install(FILES ${tandem_headers} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tandem)
# The export holds every target and needs no other package, so it is itself the configuration.
install(EXPORT Tandem NAMESPACE Tandem:: FILE TandemConfig.cmake DESTINATION ${package_directory})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/TandemConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/TandemConfigVersion.cmake DESTINATION ${package_directory})

# The archive's users link what it needs; the shared library brings its own.
set(private_libraries "-ldnnl -lyajl -lpcre2-8 -lz -fopenmp -lpthread -lm")
if(tandem_cuda)
    string(APPEND private_libraries " ${CUDA_cudart_static_LIBRARY} -lrt -ldl -lstdc++")
endif()
if(BUILD_SHARED_LIBS)
    set(libraries "-ltandem")
else()
    set(libraries "-ltandem ${private_libraries}")
    set(private_libraries "")
endif()
# The file finds its prefix from where it lies, so that an installed tree can be moved.
file(RELATIVE_PATH pc_prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(cmake/tandem.pc.in tandem.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tandem.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
