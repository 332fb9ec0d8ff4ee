#!/bin/sh
# selections.sh CHECKOUT TEST: fails where check.sh names a test of test_cuda.c that is not there, or where the program TEST takes a name that
# none of its tests has. A selection that runs nothing would pass.
set -eu
checkout=$1 test=$2 status=0

names=$(sed -n 's/^ *compute_sanitizer [a-z]* \(test_[a-z0-9_]*\)$/\1/p' "$checkout/check.sh" | sort -u)
[ -n "$names" ] || { echo "check.sh selects no test for compute-sanitizer"; exit 1; }
for name in $names; do
    grep -q "^START_TEST($name)\$" "$checkout/tests/test_cuda.c" || { echo "check.sh runs $name, which tests/test_cuda.c does not have"; status=1; }
done

if message=$(CK_RUN_CASE=test_that_is_not_there "$test" 2>&1 >/dev/null); then
    echo "$test runs nothing, and passes"
    status=1
fi
case $message in
*"no test ran: CK_RUN_CASE is 'test_that_is_not_there'"*) ;;
*) echo "$test says: $message"; status=1 ;;
esac
exit $status
