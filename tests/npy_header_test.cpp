#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "tests/fuzz/npy_header_invariants.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/sanitized.hpp"

// ---- the largest allocation, counted for the whole executable ---------------------------------------------

namespace {
std::atomic<std::size_t> largest_allocation = 0;
}

// not inlined, as g++ would see new without delete in one place and free without malloc in another, and warn
[[gnu::noinline]] void* operator new(std::size_t size) {
    std::size_t largest = largest_allocation.load();
    while (size > largest && !largest_allocation.compare_exchange_weak(largest, size)) {
    }
    if (void* const data = std::malloc(size == 0 ? 1 : size)) return data;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* data) noexcept {
    std::free(data);
}
[[gnu::noinline]] void operator delete(void* data, std::size_t) noexcept {
    std::free(data);
}

namespace {

using npy_bytes::as_bytes;
using npy_bytes::header;
using npy_bytes::text;
using pinflow::format_error;
using pinflow::parse_npy_header;
using pinflow::shape_vector;

constexpr std::uint64_t any_size = std::numeric_limits<std::int64_t>::max();

pinflow::npy_header parse(const std::string& bytes, std::uint64_t file_size_bytes = any_size) {
    return parse_npy_header(as_bytes(bytes), file_size_bytes);
}

std::string repeated(std::string_view piece, std::size_t times) {
    std::string result;
    for (std::size_t index = 0; index < times; ++index)
        result += piece;
    return result;
}

/// A structured type around a number, that many deep.
std::string nested(std::size_t depth) {
    return repeated("[('a', ", depth) + "'<f4'" + repeated(")]", depth);
}

/// The sentence that `bytes` are refused with, in a file of that size, or "accepted".
std::string refusal(const std::string& bytes, std::uint64_t file_size_bytes = any_size) {
    try {
        parse(bytes, file_size_bytes);
        return "accepted";
    } catch (const format_error& failure) {
        return failure.what();
    }
}

struct bad_text {
    std::string text;
    std::string sentence;  ///< a part of it
};

void check_refused(const std::vector<bad_text>& cases, unsigned major_version = 1) {
    for (const bad_text& bad : cases) {
        CAPTURE(bad.text.substr(0, 200));
        const auto started = std::chrono::steady_clock::now();
        const std::string sentence = refusal(header(bad.text, major_version));
        CHECK(std::chrono::steady_clock::now() - started < std::chrono::seconds(1));
        CHECK_MESSAGE(sentence.find(bad.sentence) != std::string::npos, sentence);
        CHECK(sentence.find('\n') == std::string::npos);
        CHECK(sentence.size() < 2000);
    }
}

}  // namespace

// ---- what is accepted -------------------------------------------------------------------------------------

TEST_CASE("npy header: reads what numpy writes") {
    const auto read = parse(header(text("'<f4'", "(2, 3)") + "          \n"));
    CHECK(read.dtype.descr() == "<f4");
    CHECK(read.shape == shape_vector{2, 3});
    CHECK_FALSE(read.fortran_order);
    CHECK(read.data_offset_bytes == 10 + text("'<f4'", "(2, 3)").size() + 11);
}

TEST_CASE("npy header: reads versions 1.0, 2.0 and 3.0") {
    for (const unsigned version : {1u, 2u, 3u}) {
        CAPTURE(version);
        const std::string bytes = header(text("'>i8'", "(7,)", "True") + "\n", version);
        const auto read = parse(bytes);
        CHECK(read.dtype.descr() == ">i8");
        CHECK(read.shape == shape_vector{7});
        CHECK(read.fortran_order);
        CHECK(read.data_offset_bytes == bytes.size());
    }
}

TEST_CASE("npy header: reads the listed spellings of other writers") {
    for (const char* const spelling : {
             "{'descr': 'float32', 'fortran_order': False, 'shape': (2, 3), }",
             R"({"descr": "<f4", "fortran_order": False, "shape": (2, 3), })",
             "{'shape': (2, 3), 'fortran_order': False, 'descr': '<f4'}",
             "{'descr':'<f4','fortran_order':False,'shape':(2,3)}",
             "{ 'descr' : '<f4' , 'fortran_order' : False , 'shape' : ( 2 , 3 , ) , }",
             "{\n'descr':\t'<f4',\n'fortran_order':\tFalse,\n'shape': (2,\n 3),\n}",
             "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }",
             "{'descr': '=f4', 'fortran_order': False, 'shape': (2, 3), }",
             "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), } \t \n\n",
         }) {
        CAPTURE(spelling);
        const auto read = parse(header(spelling));
        CHECK(read.dtype.descr() == "<f4");
        CHECK(read.shape == shape_vector{2, 3});
        CHECK_FALSE(read.fortran_order);
    }
}

TEST_CASE("npy header: reads shapes without axes, with one, with empty ones and with 64") {
    CHECK(parse(header(text("'<f4'", "()"))).shape.empty());
    CHECK(parse(header(text("'<f4'", "( )"))).shape.empty());
    CHECK(parse(header(text("'<f4'", "(0,)"))).shape == shape_vector{0});
    CHECK(parse(header(text("'<f4'", "(5, 0, 3)"))).shape == shape_vector{5, 0, 3});
    const std::string ones = repeated("1, ", 64);
    CHECK(parse(header(text("'<f4'", std::string("(").append(ones).append(")")))).shape ==
          shape_vector(64, 1));
}

TEST_CASE("npy header: reads any alignment of the data") {
    for (std::size_t padding = 0; padding < 70; ++padding) {
        const std::string bytes = header(text("'<f8'", "(3,)") + std::string(padding, ' '));
        CHECK(parse(bytes, bytes.size() + 24).data_offset_bytes == bytes.size());
    }
}

TEST_CASE("npy header: the file may continue, but must hold what the header declares") {
    const std::string bytes = header(text("'<f8'", "(16, 32)") + "\n");
    CHECK_NOTHROW(parse(bytes, bytes.size() + 4096));
    CHECK_NOTHROW(parse(bytes, bytes.size() + 4097));
    CHECK(contains_all(refusal(bytes, bytes.size() + 4095), {"header declares 4096 bytes", "file has 4095"}));
    CHECK_NOTHROW(parse(header(text("'<f8'", "(16, 0)")), header(text("'<f8'", "(16, 0)")).size()));
    const std::string scalar = header(text("'<f8'", "()"));
    CHECK_NOTHROW(parse(scalar, scalar.size() + 8));
    CHECK(contains_all(refusal(scalar, scalar.size()), {"header declares 8 bytes", "file has 0"}));
}

TEST_CASE("npy header: the bytes may be a prefix of the file that continues past the header") {
    const std::string bytes = header(text("'<f8'", "(2,)")) + std::string(9, '}');
    CHECK(parse(bytes, any_size).data_offset_bytes == bytes.size() - 9);
}

// ---- structured types -------------------------------------------------------------------------------------

TEST_CASE("npy header: reads structured types as numpy does") {
    struct {
        const char* literal;
        const char* descr;  // as numpy would spell it
        std::uint64_t size_bytes;
    } const cases[] = {
        {"[('a', '<f4'), ('b', '>i8')]", "[('a', '<f4'), ('b', '>i8')]", 12},
        {"[ ( 'a' , '<f4' , ) , ]", "[('a', '<f4')]", 4},
        {"[('a', 'float32')]", "[('a', '<f4')]", 4},
        {"[('a', '<f4', (2, 3))]", "[('a', '<f4', (2, 3))]", 24},
        {"[('a', '<f4', (2, 3,),)]", "[('a', '<f4', (2, 3))]", 24},
        {"[('a', '<f4', 3)]", "[('a', '<f4', (3,))]", 12},
        {"[('a', '<f4', ())]", "[('a', '<f4')]", 4},
        {"[('a', '<f4', (1,))]", "[('a', '<f4', (1,))]", 4},
        {"[('a', '<f4', (0, 2)), ('b', '|i1')]", "[('a', '<f4', (0, 2)), ('b', '|i1')]", 1},
        {"[('a', '<f4', 0), ('b', '|i1')]", "[('a', '<f4', (0,)), ('b', '|i1')]", 1},
        {"[('a', '<f4', (2L, 3L))]", "[('a', '<f4', (2, 3))]", 24},
        {"[(('title', 'name'), '<f4')]", "[(('title', 'name'), '<f4')]", 4},
        {"[((u'title', 'name',), '<f4', 2)]", "[(('title', 'name'), '<f4', (2,))]", 8},
        {"[('a', [('b', [('c', '|S3')], (2,))])]", "[('a', [('b', [('c', '|S3')], (2,))])]", 6},
        {"[('a', '|i1'), ('', '|V7'), ('b', '<f8')]", "[('a', '|i1'), ('', '|V7'), ('b', '<f8')]", 16},
        {"[('', '|V3'), ('a', '|i1'), ('', '|V4')]", "[('', '|V3'), ('a', '|i1'), ('', '|V4')]", 8},
        {"[('', '|V3'), ('', '|V2'), ('a', '|i1')]", "[('', '|V5'), ('a', '|i1')]", 6},
        {"[('', '|V2', (2, 2)), ('a', '|i1')]", "[('', '|V8'), ('a', '|i1')]", 9},
        {"[('', '<f4', (2,)), ('a', '|i1')]", "[('', '|V8'), ('a', '|i1')]", 9},
        {"[('', [('b', '<f4')], (2,)), ('a', '|i1')]", "[('', '|V8'), ('a', '|i1')]", 9},
        {"[('a', '|V4')]", "[('a', '|V4')]", 4},
        {"[('a', '|V2', (2,))]", "[('a', '|V2', (2,))]", 4},
        // arrays of arrays, which are one array of more axes here
        {"[('a', ('<f4', (2,)), (3,))]", "[('a', '<f4', (3, 2))]", 24},
        {"[('a', ('<f4', (2,)))]", "[('a', '<f4', (2,))]", 8},
        {"[('a', (('<f4', 2), (3, 4),), 5)]", "[('a', '<f4', (5, 3, 4, 2))]", 480},
        {"[('a', ('<f4', ()), ())]", "[('a', '<f4')]", 4},
        {"[('a', ([('b', '<f4')], (2,)), (3,))]", "[('a', [('b', '<f4')], (3, 2))]", 24},
    };
    for (const auto& [literal, descr, size_bytes] : cases) {
        CAPTURE(literal);
        const auto read = parse(header(text(literal, "(3,)")));
        CHECK(read.dtype.descr() == descr);
        CHECK(read.dtype.size_bytes() == size_bytes);
        CHECK(read.dtype.kind() == pinflow::dtype_kind::opaque);
    }
    CHECK(parse(header(text(nested(32), "()"))).dtype.size_bytes() == 4);
}

TEST_CASE("npy header: the offset of a field is the sum of the sizes before it") {
    const auto type =
        parse(header(text("[('a', '|S3'), ('', '|V5'), (('t', 'b'), '>f8', (2,)), ('c', [('d', '|u1')])]",
                          "()")))
            .dtype;
    REQUIRE(type.fields().size() == 3);
    CHECK(type.fields()[0].offset_bytes == 0);
    CHECK(type.fields()[1].offset_bytes == 8);
    CHECK(type.fields()[1].title == "t");
    CHECK(type.fields()[1].type == pinflow::dtype::parse(">f8"));
    CHECK(type.fields()[1].shape == shape_vector{2});
    CHECK(type.fields()[2].offset_bytes == 24);
    CHECK(type.fields()[2].type.fields()[0].name == "d");
}

TEST_CASE("npy header: names of fields become UTF-8") {
    struct {
        std::string literal;
        unsigned major_version;
        std::string name;
    } const cases[] = {
        {"'caf\xE9'", 1, "caf\u00e9"},
        {"'caf\xE9'", 2, "caf\u00e9"},
        {"'\xC3\xA9'", 1, "\u00c3\u00a9"},
        {"'\xC3\xA9'", 3, "\u00e9"},
        {"'\xE6\x95\xB0 \xF0\x9F\x98\x80'", 3, "\u6570 \U0001F600"},
        {R"('\xe9\u6570\U0001F600')", 1, "\u00e9\u6570\U0001F600"},
        {R"('\u6570')", 3, "\u6570"},
        {R"('it\'s \"a\" \\ b')", 1, R"(it's "a" \ b)"},
        {R"("it's")", 1, "it's"},
        {R"('\t\n\r\x00\x7F')", 1, std::string("\t\n\r\0\x7F", 5)},
        {R"('\\u6570')", 1, R"(\u6570)"},
    };
    for (const auto& [literal, major_version, name] : cases) {
        CAPTURE(literal);
        const auto read = parse(header(text("[(" + literal + ", '<f4')]", "()"), major_version));
        CHECK(read.dtype.fields()[0].name == name);
        // in whichever version is written, the name is the same
        const auto again = parse(pinflow::format_npy_header(read.dtype, {}));
        CHECK(again.dtype == read.dtype);
    }
}

// ---- what is refused --------------------------------------------------------------------------------------

TEST_CASE("npy header: refuses what is not a .npy file") {
    const std::string rest = header(text("'<f4'", "(2, 3)")).substr(6);
    for (const std::string& begin :
         {std::string("\x92NUMPY"), std::string("\0NUMPY", 6), std::string("\x93numpy"),
          std::string("\x93MATLB"), std::string("PK\3\4ab")}) {
        CHECK(refusal(begin + rest).find("not a .npy file") != std::string::npos);
    }
    for (const char* const version : {"\0\0", "\0\1", "\1\1", "\2\2", "\4\0", "\xFF\xFF"}) {
        const std::string bytes = "\x93NUMPY" + std::string(version, 2) + rest.substr(2);
        CHECK(refusal(bytes).find("version is") != std::string::npos);
    }
}

TEST_CASE("npy header: refuses a file truncated after any byte") {
    for (const unsigned version : {1u, 2u, 3u}) {
        const std::string bytes = header(text("'<f4'", "(2, 3)") + "    \n", version) + std::string(24, 'x');
        CHECK_NOTHROW(parse(bytes, bytes.size()));
        for (std::size_t size = 0; size < bytes.size(); ++size) {
            CAPTURE(size);
            CHECK(refusal(bytes.substr(0, size), size) != "accepted");
        }
    }
}

TEST_CASE("npy header: refuses lengths that the file cannot hold, or that numpy would not read") {
    using namespace std::string_literals;
    CHECK(contains_all(refusal("\x93NUMPY\2\0\xF0\xFF\xFF\xFF"s, 12),
                       {"the header's length", "as 4294967280 bytes", "only 0 follow"}));
    CHECK(contains_all(refusal("\x93NUMPY\1\0\xFF\xFF{}"s, 12),
                       {"the header's length", "as 65535 bytes", "only 2 follow"}));
    CHECK(refusal("\x93NUMPY\2\0\xF0\xFF\xFF\xFF{}"s).find("numpy and pinflow read at most 10000") !=
          std::string::npos);
    CHECK(contains(refusal("\x93NUMPY\1\0\0\0"s, 10), "ends where '{'"));
    CHECK(refusal("\x93NUMPY\1\0\xFF\x00{}"s).find("but only 2 are there") != std::string::npos);

    const std::string short_text = text("'<f4'", "()");
    for (const unsigned version : {1u, 2u, 3u}) {
        CHECK_NOTHROW(parse(header(short_text + std::string(10'000 - short_text.size(), ' '), version)));
        CHECK(refusal(header(short_text + std::string(10'001 - short_text.size(), ' '), version)) !=
              "accepted");
    }
}

TEST_CASE("npy header: counts the limit of version 3.0 in characters") {
    const std::string begin = "{'descr': [('";
    const std::string end = "', '<f4')], 'fortran_order': False, 'shape': (), }";
    const std::size_t room = 10'000 - begin.size() - end.size();
    const auto read = parse(header(begin + repeated("\xF0\x9F\x98\x80", room) + end, 3));
    CHECK((read.dtype.fields()[0].name == repeated("\xF0\x9F\x98\x80", room)));
    CHECK(refusal(header(begin + repeated("\xF0\x9F\x98\x80", room + 1) + end, 3)).find("10001 characters") !=
          std::string::npos);
}

TEST_CASE("npy header: refuses malformed dictionaries") {
    const std::string good = text("'<f4'", "(2, 3)");
    check_refused({
        {"", "ends where '{'"},
        {"{", "ends where a string"},
        {"{}", "lacks the key 'descr'"},
        {"[]", "where '{' should be"},
        {"{'descr': '<f4', 'fortran_order': False, }", "lacks the key 'shape'"},
        {"{'descr': '<f4', 'shape': (), }", "lacks the key 'fortran_order'"},
        {"{'fortran_order': False, 'shape': (), }", "lacks the key 'descr'"},
        {good.substr(0, good.size() - 1) + "'extra': 1, }", "unknown key 'extra'"},
        {"{'Descr': '<f4', }", "unknown key 'Descr'"},
        {"{descr: '<f4', }", "where a string should be"},
        {"{'descr' '<f4', }", "where ':' should be"},
        {"{'descr': '<f4' 'fortran_order': False, }", "where ',' should be"},
        {"{'descr': '<f4',, 'fortran_order': False, }", "where a string should be"},
        {"{,}", "where a string should be"},
        {"{'descr: ", "the end of a string"},
        {"{'descr': '<f4\n', }", "the end of a string"},
        {"{'descr\\", "the end of a string"},
        {good + ",", "nothing but padding"},
        {good + "}", "nothing but padding"},
        {good + "\n x", "nothing but padding"},
        {good + std::string(1, '\0'), "nothing but padding"},
        {std::string("{\0'descr': '<f4'}", 17), "where a string should be"},
        {std::string("{'des\0cr': '<f4'}", 17), "the end of a string"},
        {"{'descr': '<\xE9\x34', 'fortran_order': False, 'shape': (), }", R"(type '<\xe94' is not one)"},
        {"{\xE9: 1}", "where a string should be"},
        {repeated("(", 5'000), "where '{' should be"},
        {repeated("{", 5'000), "where a string should be"},
        {repeated("(", 10'000), "where '{' should be"},
    });
}

TEST_CASE("npy header: refuses invalid UTF-8 in version 3.0") {
    for (const char* const bytes :
         {"\x80", "\xC3", "\xC0\xAF", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80", "\xF4\x90\x80\x80",
          "\xF5\x80\x80\x80", "\xFF", "\xE2\x82", "\xC3\x28"}) {
        const std::string descr = "[('" + std::string(bytes) + "', '<f4')]";
        check_refused({{text(descr, "()"), "not valid UTF-8"}}, 3);
        CHECK(refusal(header(text(descr, "()"), 2)) == "accepted");
    }
}

TEST_CASE("npy header: refuses malformed shapes") {
    const auto shape = [](const std::string& literal) { return text("'<f4'", literal); };
    check_refused({
        {shape("(-1,)"), "where a length in the shape should be"},
        {shape("(" + repeated("-", 5'000) + "1,)"), "where a length in the shape should be"},
        {shape("(2, 18446744073709551614)"), "more than numpy allows"},
        {shape("(0, 9223372036854775808)"), "more than numpy allows"},
        {shape("(18446744073709551616,)"), "more than numpy allows"},
        {shape("(" + std::string(9'000, '9') + ",)"), "more than numpy allows"},
        {shape("(4294967296, 4294967296)"), "larger than any file"},
        {shape("(2305843009213693952,)"), "larger than any file"},
        {shape("(0, 9223372036854775807)"), "larger than any file"},
        {shape("(2305843009213693951,)"), "larger than any file"},
        {shape("(" + repeated("1, ", 65) + ")"), "more than 64 axes"},
        {shape("(3)"), "a number, not a tuple"},
        {shape("3"), "where '(' should be"},
        {shape("[2, 3]"), "where '(' should be"},
        {shape("None"), "where '(' should be"},
        {shape("(1.0,)"), "where ',' or ')'"},
        {shape("1.0"), "where '(' should be"},
        {shape("(1e3,)"), "where ',' or ')'"},
        {shape("(True, 2)"), "where a length in the shape should be"},
        {shape("('2',)"), "where a length in the shape should be"},
        {shape("(2 3)"), "where ',' or ')'"},
        {shape("(2,, 3)"), "where a length in the shape should be"},
        {shape("(,)"), "where a length in the shape should be"},
        {shape("(02,)"), "where a length in the shape should be"},
        {shape("(2l,)"), "where ',' or ')'"},
        {shape("(2LL,)"), "where ',' or ')'"},
        {shape("(2"), "where a length in the shape should be"},
        {"{'shape': (2", "ends where ',' or ')'"},
    });
    check_refused({{shape("(2L,)"), "where ',' or ')'"}}, 3);
}

TEST_CASE("npy header: refuses sizes that overflow with the data's offset") {
    // 2^63 - 16 bytes of data fit into numpy's integers, but not after a header
    const std::string bytes = header(text("'<f8'", "(1152921504606846974,)"));
    CHECK(refusal(bytes, any_size).find("larger than any file") != std::string::npos);
    CHECK(refusal(bytes, std::numeric_limits<std::uint64_t>::max()) == "accepted");
}

TEST_CASE("npy header: refuses other values of fortran_order than True and False") {
    for (const char* const value : {"1", "0", "None", "'True'", "true", "", "(True)"}) {
        check_refused({{text("'<f4'", "()", value), "True or False as fortran_order"}});
    }
    check_refused({{text("'<f4'", "()", "Truer"), "where ',' should be"}});
}

TEST_CASE("npy header: refuses types that numpy does not know, and types nested more than 32 deep") {
    for (const char* const descr : {"'<ixy'", "''", "'<f3'", "'<U1073741824'", "'|S99999999999999999999'"}) {
        check_refused({{text(descr, "()"), "is not one that numpy writes"}});
    }
    check_refused({
        {text("1", "()"), "where a string should be"},
        {text("None", "()"), "where a string should be"},
        {text("{}", "()"), "where a string should be"},
        {text(nested(1'000), "()"), "nested more than 32 deep"},
        {text(nested(33), "()"), "nested more than 32 deep"},
        {text("[('a', " + repeated("(", 4'000), "()"), "nested more than 32 deep"},
        {text(repeated("[", 4'000), "()"), "where '(' should be"},
        {text("'[(1)]'", "()"), "is not one that numpy writes"},
        {text("'bfloat16'", "()"), "is not one that numpy writes"},
        {text("'float8_e5m2'", "()"), "is not one that numpy writes"},
        {text("[('a', 'bfloat16')]", "()"), "is not one that numpy writes"},
        {text("[('a', '<f3')]", "()"), "is not one that numpy writes"},
    });
}

TEST_CASE("npy header: refuses malformed lists of fields") {
    const auto list = [](const std::string& literal) { return text(literal, "(3,)"); };
    check_refused({
        {list("[('a', '<f4'))"), "where ',' should be"},
        {list("[('a', -1)]"), "where a string should be"},
        {list("[('a', f())]"), "where a string should be"},
        {"{'descr': [('a', '<f4')", "ends where ',' should be"},
        {list("[,]"), "where '(' should be"},
        {list("[('a', '<f4') ('b', '<f4')]"), "where ',' should be"},
        {list("[('a', '<f4'),, ('b', '<f4')]"), "where '(' should be"},
        {list("['a']"), "where '(' should be"},
        {list("[()]"), "where a string should be"},
        {list("[('a',)]"), "where a string should be"},
        {list("[('a')]"), "where ',' should be"},
        {list("[(1, '<f4')]"), "where a string should be"},
        {list("[('a', '<f4', (2,), 1)]"), "where ')' should be"},
        {list("[('a', '<f4', (-1,))]"), "a length in the shape"},
        {list("[('a', '<f4', (2.0,))]"), "where ',' or ')'"},
        {list("[('a', '<f4', (True,))]"), "a length in the shape"},
        {list("[('a', '<f4', True)]"), "a length in the shape"},
        {list("[('a', '<f4', None)]"), "a length in the shape"},
        {list("[('a', '<f4', (2147483648, 0))]"), "more than numpy allows"},
        {list("[('a', '<f4', (536870912,))]"), "larger than numpy allows"},
        {list("[('a', '<f4', (268435456,)), ('b', '<f4', (268435456,))]"), "cannot have 2147483648 bytes"},
        {list("[('a', '|S2147483647'), ('b', '|i1')]"), "cannot have 2147483648 bytes"},
        {list("[('a', '|S2147483647'), ('', '|V1')]"), "cannot have 2147483648 bytes"},
        {list("[('', '|V2147483647', (4294967296, 4294967296)), ('a', '<f4')]"), "more than numpy allows"},
        {list("[('a', '<f4'), ('a', '<i4')]"), "two fields of a structured type are called 'a'"},
        {list("[(('t', 't'), '<f4')]"), "two fields of a structured type are called 't'"},
        {list("[(('t', 'a'), '<f4'), ('t', '<f4')]"), "two fields of a structured type are called 't'"},
        {list("[(('t', 'a'), '<f4'), (('t', 'b'), '<f4')]"),
         "two fields of a structured type are called 't'"},
        {list("[('a', '<f4'), (('a', 'b'), '<f4')]"), "two fields of a structured type are called 'a'"},
        {list("[(('t', 'n', 'x'), '<f4')]"), "where ')' should be"},
        {list("[(('t',), '<f4')]"), "where a string should be"},
        {list("[(b'a', '<f4')]"), "where a string should be"},
        {list("[('a\\x4', '<f4')]"), "stands for no character"},
        {list("[('a\\xg0', '<f4')]"), "stands for no character"},
        {list("[('a\\u12', '<f4')]"), "stands for no character"},
        {list("[('a\\U00110000', '<f4')]"), "stands for no character"},
        {list("[('a\\', '<f4')]"), "where ',' should be"},
        {list("[('a', ('<f4', (0,)), (2,)), ('b', '<f4')]"), "an array of arrays without bytes"},
        {list("[('a', ('<f4', (0,)), ()), ('b', '<f4')]"), "an array of arrays without bytes"},
        {list("[('a', ('<f4',))]"), "a length in the shape"},
        {list("[('a', ())]"), "where a string should be"},
    });
    check_refused({{list("[('a', '<f4', (2L,))]"), "where ',' or ')'"}}, 3);
}

TEST_CASE("npy header: calls pickled objects unsupported") {
    for (const char* const descr : {"'|O'", "'O'", "'|O8'", "[('a', '<f4'), ('b', '|O')]",
                                    "[('a', [('b', 'O', (2,))])]", "[('', 'O')]"}) {
        CHECK_THROWS_WITH_AS(parse(header(text(descr, "(3,)"))), doctest::Contains("pickle"),
                             pinflow::unsupported);
    }
}

TEST_CASE("npy header: reads types without bytes and without fields, and writes them as numpy does") {
    for (const char* const descr :
         {"'|V0'", "'|S0'", "'<U0'", "'>U0'", "[]", "[('', '|V4')]", "[('a', '|S0'), ('b', '<f4')]",
          "[('a', '|V0'), ('b', '>i2')]", "[('a', []), ('b', '<f4')]", "[('a', [], (2,))]",
          "[('a', [('', '|V4')])]", "[('a', '<f4', (0,))]", "[('a', '<U0')]"}) {
        CAPTURE(descr);
        const auto read = parse(header(text(descr, "(3,)")));
        CHECK(read.shape == pinflow::shape_vector{3});
        const std::string written = pinflow::format_npy_header(read.dtype, read.shape, false);
        CHECK(written.find("'descr': " + std::string(descr) + ",") != std::string::npos);
    }
    CHECK(parse(header(text("'|V0'", "(1099511627776, 7)"))).dtype.size_bytes() == 0);
}

TEST_CASE("npy header: refuses unusual headers that numpy accepts and no program writes") {
    const std::string good = text("'<f4'", "(2, 3)");
    struct {
        const char* name;
        std::string text;
    } const cases[] = {
        {"a key twice", good.substr(0, good.size() - 1) + "'shape': (2, 3), }"},
        {"a key twice with another value", good.substr(0, good.size() - 1) + "'shape': (1,), }"},
        {"descr twice", good.substr(0, good.size() - 1) + "'descr': '<f8', }"},
        {"fortran_order twice", good.substr(0, good.size() - 1) + "'fortran_order': True, }"},
        {"more elements of no bytes than can be counted", text("'|V0'", "(4294967296, 4294967296)")},
        {"an array of elements without bytes", text("[('a', '|S0', (2,)), ('b', '<f4')]", "(2, 3)")},
        {"a size that wraps to zero", text("'<U1073741824'", "(2, 3)")},
        {"a hexadecimal length", text("'<f4'", "(0x2, 3)")},
        {"an underscore in a length", text("'<f4'", "(1_0,)")},
        {"more zeros than one", text("'<f4'", "(00,)")},
        {"a sign of a length", text("'<f4'", "(+2, 3)")},
        {"minus zero", text("'<f4'", "(-0,)")},
        {"a length in parentheses", text("'<f4'", "((2), 3)")},
        {"a space before L", text("'<f4'", "(2 L, 3)")},
        {"adjacent strings", text("'<f' '4'", "(2, 3)")},
        {"triple quotes", text("'''<f4'''", "(2, 3)")},
        {"an escape in a type", text("'<f\\x34'", "(2, 3)")},
        {"an escape in a key", "{'d\\x65scr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"},
        {"a prefix of a string", text("r'<f4'", "(2, 3)")},
        {"Python 2's prefix of a string", text("u'<f4'", "(2, 3)")},
        {"parentheses around fortran_order", text("'<f4'", "(2, 3)", "(False)")},
        {"parentheses around it all", "(" + good + ")"},
        {"a comment at the end", good + "# comment"},
        {"a comment within", text("'<f4'", "(2, # comment\n3)")},
        {"a backslash before a line end", text("'<f4'", "(2, \\\n3)")},
        {"space before it all", " " + good},
        {"a line end before it all", "\n" + good},
        {"spaces after a line end", good + "\n  "},
        {"a carriage return", good + "\r\n"},
        {"a form feed", text("'<f4'", "(2,\f3)")},
        {"a structured type in short", text("'f4,i4'", "(2, 3)")},
        {"a subarray in short", text("'2f4'", "(2, 3)")},
        {"a type's letter without a size", text("'f'", "(2, 3)")},
        {"a divisor of a time unit", text("'<M8[7s/2]'", "(2, 3)")},
        {"a gap of any length", text("[('a', '<f4'), ('', 'V')]", "(2, 3)")},
        {"lengths beside 0 that are too large", text("[('a', '<f4', (0, 2147483647)), ('b', '<f4')]", "()")},
        {"a field without a name", text("[('', '<f4')]", "(2, 3)")},
        {"a field without a name, but with a title", text("[(('t', ''), '|V4')]", "(2, 3)")},
        {"an empty title", text("[(('', 'a'), '<f4')]", "(2, 3)")},
        {"no title", text("[((None, 'a'), '<f4')]", "(2, 3)")},
        {"a title that is a number", text("[((1, 'a'), '<f4')]", "(2, 3)")},
        {"a title in bytes", text("[((b't', 'a'), '<f4')]", "(2, 3)")},
        {"a list as a field", text("[['a', '<f4']]", "(2, 3)")},
        {"a list as a field's shape", text("[('a', '<f4', [2, 3])]", "(2, 3)")},
        {"the shape 1, which numpy will change its mind about", text("[('a', '<f4', 1)]", "(2, 3)")},
        {"a field's shape in parentheses", text("[('a', '<f4', (3))]", "(2, 3)")},
        {"a field's type in parentheses", text("[('a', ('<f4'))]", "(2, 3)")},
        {"more after a type and its shape", text("[('a', ('<f4', (2,), 3))]", "(2, 3)")},
        {"a field's types in short", text("[('a', 'f4,i4')]", "(2, 3)")},
        {"an array as an array's type", text("('<f4', (2,))", "(2, 3)")},
        {"an array without axes as an array's type", text("('<f4', ())", "(2, 3)")},
        {"an octal escape in a name", text("[('\\101', '<f4')]", "(2, 3)")},
        {"a bell in a name", text("[('\\a', '<f4')]", "(2, 3)")},
        {"a character's name in a name", text("[('\\N{BULLET}', '<f4')]", "(2, 3)")},
        {"a line end left out in a name", text("[('a\\\n', '<f4')]", "(2, 3)")},
        {"half of a surrogate pair in a name", text("[('\\ud83d', '<f4')]", "(2, 3)")},
        {"a tab in a name", text("[('a\tb', '<f4')]", "(2, 3)")},
        {"Python 2's prefix of a name", text("[(u'a', '<f4')]", "(2, 3)")},
        {"adjacent strings in a name", text("[('a' 'b', '<f4')]", "(2, 3)")},
        {"types nested 33 deep", text(nested(33), "()")},
    };
    for (const auto& [name, oddity] : cases) {
        CAPTURE(name);
        CHECK(refusal(header(oddity)) != "accepted");
    }
    CHECK(refusal(header(text("('<f4')", "(2, 3)"))) != "accepted");
    // Python 2's prefix of a title, in a version that Python 2 never wrote
    CHECK(refusal(header(text("[((u't', 'a'), '<f4')]", "(2, 3)"), 3)) != "accepted");
}

TEST_CASE("npy header: no hostile length or shape makes it allocate more than 4 KiB at once") {
    using namespace std::string_literals;
    const std::vector<std::string> hostile = {
        "\x93NUMPY\2\0\xF0\xFF\xFF\xFF"s,
        "\x93NUMPY\2\0\xF0\xFF\xFF\xFF{}"s,
        "\x93NUMPY\3\0\xFF\xFF\xFF\xFF{}"s,
        "\x93NUMPY\1\0\xFF\xFF{}"s,
        header(text("'<f4'", "(9223372036854775807,)")),
        header(text("'<f4'", "(0, 9223372036854775807)")),
        header(text("'<f4'", "(1099511627776, 2)")),
        header(text("'|S2147483647'", "(2147483647, 2)")),
        header(text("'|S99999999999999999999'", "(1,)")),
        header(text("'" + std::string(9'000, 'x') + "'", "(1,)")),
        header(text("'<f4'", "(" + repeated("1, ", 3'000) + ")")),
        header(text("'<f4'", "(" + std::string(9'000, '9') + ",)")),
        header(repeated("(", 9'999)),
        header(text(repeated("[", 9'000), "()")),
        header(text(nested(1'000), "()")),
        header(text("[('a', " + repeated("(", 9'000), "()")),
        header(text("[('a', '<f4', (2147483647, 2147483647, 2147483647))]", "(1,)")),
        header(text("[('a', '|S2147483647', 2147483647)]", "(1,)")),
        header("{" + std::string(9'000, '\'')),
    };
    std::size_t refused = 0;
    std::size_t largest = 0;
    for (const std::string& bytes : hostile) {
        for (const std::uint64_t file_size : {std::uint64_t{bytes.size()}, any_size}) {
            largest_allocation = 0;
            try {
                parse(bytes, file_size);
            } catch (const format_error&) {
                ++refused;
            }
            largest = std::max(largest, largest_allocation.load());
        }
    }
    CHECK(refused > hostile.size());
    CHECK(largest > 0);
    CHECK(largest <= 4096);
}

// ---- fuzzing ----------------------------------------------------------------------------------------------

TEST_CASE("npy header: the invariants hold for the fuzzer's seeds, findings and their mutations") {
    const auto folder = std::filesystem::path(__FILE__).parent_path() / "fuzz";
    std::size_t files = 0;
    for (const auto& inputs : {folder / "seeds" / "npy_header", folder / "regressions" / "npy_header"}) {
        if (!std::filesystem::exists(inputs)) continue;  // nothing found so far
        for (const auto& entry : std::filesystem::directory_iterator(inputs)) {
            CAPTURE(entry.path().filename().string());
            std::string bytes = npy_bytes::read_file(entry.path().string());
            ++files;
            CHECK(npy_header_invariants::broken_for(as_bytes(bytes)) == "");
            constexpr std::size_t step = sanitized ? 5 : 1;  // the fuzz targets run under sanitizers, too
            for (std::size_t at = 0; at < bytes.size(); at += step) {
                const char original = bytes[at];
                for (const char replacement : {'\0', ' ', '\'', '(', ',', '0', 'L', '\\', '\xFF'}) {
                    bytes[at] = replacement;
                    const std::string broken = npy_header_invariants::broken_for(as_bytes(bytes));
                    if (!broken.empty()) FAIL_CHECK("byte " << at << ": " << broken);
                }
                bytes[at] = original;
            }
        }
    }
    CHECK(files > 10);
}

// ---- writing ----------------------------------------------------------------------------------------------

TEST_CASE("npy header: what is written is aligned and reads back the same") {
    for (const char* const descr : {"<f4", ">i8", "|b1", "|S10", "<U5", "<M8[25us]", "|V7", "<c32"}) {
        for (const shape_vector& shape :
             {shape_vector{}, shape_vector{0}, shape_vector{5}, shape_vector{2, 3},
              shape_vector{123456789, 0, 1}, shape_vector(64, 1), shape_vector{0, any_size / 32}}) {
            for (const std::uint64_t alignment : {16u, 64u, 4096u, 8192u}) {
                for (const bool fortran_order : {false, true}) {
                    const auto type = pinflow::dtype::parse(descr);
                    const std::string bytes =
                        pinflow::format_npy_header(type, shape, fortran_order, alignment);
                    CHECK(bytes.size() % alignment == 0);
                    CHECK(bytes.back() == '\n');
                    const auto read = parse(bytes);
                    CHECK(read.dtype == type);
                    CHECK(read.shape == shape);
                    CHECK(read.fortran_order == fortran_order);
                    CHECK(read.data_offset_bytes == bytes.size());
                }
            }
        }
    }
}

TEST_CASE("npy header: writes structured types in the oldest version that can hold their names") {
    const auto version_of = [](const std::string& name) {
        const auto type = pinflow::dtype::structured({{name, "", pinflow::dtype::of<float>(), {}, 0}}, 4);
        const std::string bytes = pinflow::format_npy_header(type, shape_vector{3});
        CHECK(bytes.size() % 64 == 0);
        CHECK(parse(bytes).dtype == type);
        return static_cast<int>(bytes[6]);
    };
    CHECK(version_of("a") == 1);
    CHECK(version_of("\u00e9") == 1);
    CHECK(version_of("\u00ff\u0080") == 1);
    CHECK(version_of("\u0100") == 3);
    CHECK(version_of("\U0001F600") == 3);
}

TEST_CASE("npy header: writes types that numpy lacks as raw bytes") {
    const auto written = [](const pinflow::dtype& type) {
        return parse(pinflow::format_npy_header(type, shape_vector{3})).dtype.descr();
    };
    const auto bfloat16 = pinflow::dtype::parse("bfloat16");
    CHECK(written(bfloat16) == "|V2");
    CHECK(written(pinflow::dtype::parse("float8_e4m3fn")) == "|V1");
    CHECK(written(pinflow::dtype::parse("float8_e5m2")) == "|V1");
    CHECK(written(pinflow::dtype::structured({{"a", "", bfloat16, {2}, 0}}, 4)) == "[('a', '|V2', (2,))]");
    const auto big = pinflow::dtype::parse(">bfloat16");
    for (const auto& type : {big, pinflow::dtype::structured({{"a", "", big, {}, 0}}, 2)}) {
        CHECK_THROWS_WITH_AS(pinflow::format_npy_header(type, {}),
                             doctest::Contains("convert it to little-endian"), pinflow::invalid_argument);
    }
}

TEST_CASE("npy header: has the same size for every number of rows") {
    const auto inner = pinflow::dtype::structured({{"a", "", pinflow::dtype::parse("<f4"), {2}, 0}}, 8);
    for (const auto& type : {pinflow::dtype::of<float>(), inner}) {
        const std::size_t size = pinflow::format_npy_header(type, shape_vector{0, 3}).size();
        for (const std::uint64_t rows : {std::uint64_t{9}, std::uint64_t{1234567890}, any_size}) {
            CHECK(pinflow::format_npy_header(type, shape_vector{rows, 3}).size() == size);
        }
    }
}

TEST_CASE("npy header: refuses to write what numpy would not read") {
    const auto type = pinflow::dtype::of<float>();
    const auto named = [](std::size_t length) {
        return pinflow::dtype::structured(
            {{std::string(length, 'x'), "", pinflow::dtype::of<float>(), {}, 0}}, 4);
    };
    CHECK(parse(pinflow::format_npy_header(named(9'900), {})).dtype == named(9'900));
    CHECK_THROWS_WITH_AS(pinflow::format_npy_header(named(9'990), {}), doctest::Contains("at most 10000"),
                         pinflow::invalid_argument);
    CHECK_THROWS_AS(pinflow::format_npy_header(named(70'000), {}), pinflow::invalid_argument);
    for (const std::uint64_t alignment : {0u, 1u, 8u, 63u, 96u, 16384u}) {
        CHECK_THROWS_AS(pinflow::format_npy_header(type, shape_vector{3}, false, alignment),
                        pinflow::invalid_argument);
    }
    CHECK_THROWS_AS(pinflow::format_npy_header(type, shape_vector(65, 1)), pinflow::invalid_argument);
    CHECK_THROWS_AS(pinflow::format_npy_header(type, shape_vector{any_size + 1}), pinflow::invalid_argument);
}

TEST_CASE("npy header: a simple type with 64 axes of the largest length fits a header of 8192 bytes") {
    shape_vector long_shape(64, 1);
    long_shape[0] = 0;
    CHECK_NOTHROW(parse(
        pinflow::format_npy_header(pinflow::dtype::parse("<M8[2147483647ns]"), long_shape, true, 8192)));
    shape_vector longest(64, any_size);
    CHECK(
        pinflow::format_npy_header(pinflow::dtype::parse("<M8[2147483647ns]"), longest, true, 8192).size() ==
        8192);
}
