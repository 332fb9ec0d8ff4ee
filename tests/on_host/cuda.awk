# CUDA C++ as C++ for tests/on_host: what its syntax has beyond C++'s is rewritten, line by line of the same number.
#
#     kernel<T><<<grid, block, shared, stream>>>(a, b)  ->  on_host_kernel("kernel<T>", [=](auto &...x) { kernel<T>(x...); }).on(grid, ...).with(a, b)
#     extern __shared__ float room[];                   ->  float *room = (float *)on_host_shared();
#     asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x))  ->  ptx_ex2_approx_ftz_f32(y, x), results before operands; see include/ptx.h
#
# `source`, where it is given, is what messages of the compiler name.
{ text = text $0 "\n" }

# The place behind the bracket that closes the one at `at`; brackets in strings do not count.
function closing(s, at,    depth, quoted, c)
{
    for (; at <= length(s); at++) {
        c = substr(s, at, 1)
        if (c == "\"") quoted = !quoted
        if (quoted) continue
        if (c == "(") depth++
        if (c == ")" && --depth == 0) return at + 1
    }
    return at
}

# The call for what stands in the brackets of an asm: its first word names it, its operands are the bracketed parts behind strings.
function call_of(inside,    name, list, end)
{
    match(inside, /"[^" ;]*/)
    name = substr(inside, RSTART + 1, RLENGTH - 1)
    gsub(/[.]/, "_", name)
    gsub(/[^A-Za-z0-9_]/, "", name)
    while (match(inside, /"[^"]*"[ \n]*[(]/)) {
        inside = substr(inside, RSTART + RLENGTH - 1)
        end = closing(inside, 1)
        list = list (list == "" ? "" : ", ") substr(inside, 1, end - 1)
        inside = substr(inside, end)
    }
    return "ptx_" name "(" list ")"
}

function without_asm(s,    done, begin, open, end, lines)
{
    while (match(s, /asm( volatile)?[(]/)) {
        begin = RSTART
        open = RSTART + RLENGTH - 1
        end = closing(s, open)
        lines = substr(s, open, end - open)
        done = done substr(s, 1, begin - 1) call_of(lines)
        gsub(/[^\n]/, "", lines)
        done = done lines
        s = substr(s, end)
    }
    return done s
}

function without_launches(s,    done, name, call)
{
    while (match(s, /[A-Za-z_0-9]+(<[^<>;]*>)?<<</)) {
        name = substr(s, RSTART, RLENGTH - 3)
        call = "on_host_kernel(\"" name "\", [=](auto &...on_host_argument) { " name "(on_host_argument...); }).on("
        done = done substr(s, 1, RSTART - 1) call
        s = substr(s, RSTART + RLENGTH)
        match(s, />>>[(]/)
        done = done substr(s, 1, RSTART - 1) ").with("
        s = substr(s, RSTART + RLENGTH)
    }
    return done s
}

function without_shared(s,    done, line, words)
{
    while (match(s, /extern __shared__ (__align__[(]16[)] )?[a-z]+ [a-z]+\[\];/)) {
        line = substr(s, RSTART, RLENGTH - 3)
        split(line, words, " ")
        sub(/__align__[(]16[)] /, "", line)
        split(line, words, " ")
        done = done substr(s, 1, RSTART - 1) words[3] " *" words[4] " = (" words[3] " *)on_host_shared();"
        s = substr(s, RSTART + RLENGTH)
    }
    return done s
}

END {
    if (source != "") printf "#line 1 \"%s\"\n", source
    printf "%s", without_shared(without_launches(without_asm(text)))
}
