/* Files that a crash leaves whole: written beside, synced, renamed. */
#ifndef TANDEM_FILE_H
#define TANDEM_FILE_H

#include <tandem/core.h>

/* All bytes, whatever parts the system takes them in. false: errno says why. */
bool td_file_put(int fd, const void *data, int64_t bytes);
/* Makes the renames in a directory last. Some file systems have no such call and need none. false: errno says why. */
bool td_file_sync_directory(const char *path);

/* Puts the content of a file; false: errno says why. */
typedef bool (*td_file_content)(int fd, const void *user);
/* Makes path the file that `content` puts: path.tmp is written, synced and renamed, its directory synced. false and an
 * error that names the path and the reason; then the file at path is what it was, and path.tmp is gone. */
bool td_file_replace(td_context *td, const char *path, td_file_content content, const void *user);

#endif
