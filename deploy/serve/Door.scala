// What stands between a client of `kiln serve-sql` and the lake. deploy/serve/classes.py compiles this file.
package kiln

import java.nio.charset.StandardCharsets.UTF_8
import java.nio.file.{Files, Paths}
import java.security.MessageDigest
import javax.security.sasl.AuthenticationException

import scala.util.control.NoStackTrace

import org.apache.hive.service.auth.PasswdAuthenticationProvider
import org.apache.spark.sql.SparkSessionExtensions
import org.apache.spark.sql.catalyst.expressions.{CallMethodViaReflection, Expression}
import org.apache.spark.sql.catalyst.plans.logical.{Command, LogicalPlan}
import org.apache.spark.sql.execution.command.SetCommand
import org.apache.spark.sql.internal.SQLConf

/** Takes the one user, with the password in the first line of a file. HiveServer2 makes one of these for each login, so a new password
  * holds from the next login on. */
class PasswordFile extends PasswdAuthenticationProvider {
  override def Authenticate(user: String, password: String): Unit = {
    val file = Files.readString(Paths.get(System.getProperty("kiln.sql.password-file")))
    val right = file.linesIterator.nextOption().getOrElse("")
    val known = same(user, System.getProperty("kiln.sql.user")) & same(password, right)
    if (!known || right.isEmpty) throw new AuthenticationException("user or password is wrong")
  }

  // of equal length, and compared in a time that says nothing of where they differ
  private def same(told: String, right: String): Boolean = MessageDigest.isEqual(digest(told), digest(right))

  private def digest(text: String): Array[Byte] =
    MessageDigest.getInstance("SHA-256").digest(Option(text).getOrElse("").getBytes(UTF_8))
}

/** From `close` on, nothing but questions to the tables gets through Spark's analyzer, in every session. */
object ReadOnly {
  @volatile private var closed: Option[Map[String, String]] = None

  /** Kiln has made the catalog: only questions from now on. */
  def close(): Unit = closed = Some(SQLConf.get.getAllConfs)

  def check(plan: LogicalPlan): Unit = closed.foreach { settings =>
    for ((key, value) <- SQLConf.get.getAllConfs if guarded(key) && !settings.get(key).contains(value))
      refuse(s"no client sets $key")
    plan.foreachWithSubqueries { node =>
      node match {
        case set: SetCommand if set.kv.forall(_._2.isEmpty) =>
        case command: Command if !listed(command) => refuse(s"${command.nodeName} is not possible, only questions are")
        case other if !known(other) => refuse(s"${other.nodeName} is not possible, only questions are")
        case _ =>
      }
      node.expressions.foreach(_.foreach(allow))
    }
  }

  // A client sends settings as it connects. These would bring in other files and other catalogs.
  private def guarded(key: String): Boolean = key.startsWith("spark.sql.catalog") || key == "spark.sql.runSQLOnFiles"

  private val questions =
    Seq("Show", "Describe", "Explain", "DescribeQuery", "SetNamespace", "SetCatalogAndNamespace", "GetNamespaces")

  private def listed(command: LogicalPlan): Boolean = questions.exists(command.getClass.getSimpleName.startsWith)

  // Spark's own nodes of a query. Delta's are commands, and TRANSFORM runs a program.
  private def known(node: LogicalPlan): Boolean = {
    val name = node.getClass.getName
    name.startsWith("org.apache.spark.sql.") && !name.startsWith("org.apache.spark.sql.delta.") &&
    !name.endsWith(".ScriptTransformation")
  }

  // Functions that call Java by name, or run Python.
  private def allow(expression: Expression): Unit = expression match {
    case _: CallMethodViaReflection => refuse("functions that call Java are not possible")
    case other if other.getClass.getName.contains("Python") || other.getClass.getName.startsWith("org.apache.spark.sql.hive") =>
      refuse(s"${other.prettyName} is not possible")
    case _ =>
  }

  private def refuse(what: String): Nothing =
    throw new UnsupportedOperationException(s"the lake is read only here: $what") with NoStackTrace
}

/** `spark.sql.extensions` names this class. */
class ReadOnly extends (SparkSessionExtensions => Unit) {
  override def apply(extensions: SparkSessionExtensions): Unit =
    extensions.injectCheckRule(_ => (plan: LogicalPlan) => ReadOnly.check(plan))
}
